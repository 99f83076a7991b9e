"""Conversations as OpenAI-style messages: roles, and content of text and images.

A message is ``{"role": "system" | "user" | "assistant", "content": ...}``. Content is a text, or a
list of parts: ``{"type": "text", "text": ...}``, ``{"type": "image_url", "image_url": {"url":
...}}`` and ``{"type": "image", "image": ...}``. An image is a path, a data URL, or anything else
that `mmdecode.vlm.images` reads. ``video_url`` and ``video`` are alike, with the path of a video.
Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmdecode.errors import InputError
from mmdecode.runs.inputs import refuse_address
from mmdecode.vlm.images import ImageSource, image_source, read_image

ROLES = ("system", "user", "assistant")
PLACEHOLDER = "<image>"
"""Placeholder of an image in a text, whatever the model's own placeholder is."""
_OTHER_NAMES = {
    "developer": "system",
    "input_text": "text",
    "output_text": "text",
    "input_image": "image_url",
    "input_video": "video_url",
}
"""Names that other interfaces use for the same."""
_DATA = re.compile(r"(?i)data:[^,]*?(;base64)?,")


@dataclass(frozen=True)
class Turn:
    """An earlier message of a conversation.

    Attributes:
        role: One of `ROLES`.
        text: Its text, with `PLACEHOLDER` once per image, or without any: images then come first.
        images: Number of its images.
    """

    role: str
    text: str
    images: int = 0


def turns_of(
    messages: Any, find: Callable[[str], str] = str, more: Sequence[Any] = (), at: str = ""
) -> tuple[list[Turn], list[ImageSource]]:
    """Reads messages; returns their turns, and the images of all of them in order.

    Args:
        messages: The messages; the last one is a user's.
        find: Makes the path of an image absolute.
        more: Images for parts that name none, and for placeholders in texts, in order.
        at: Beginning of errors and of names of images, such as the line of a table.

    Raises:
        InputError: A message is not as described above, or an image is an address.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError(
            f"{at}messages are {messages!r:.80}; expected a list of {{'role': ..., 'content': ...}}"
        )
    turns: list[Turn] = []
    sources: list[ImageSource] = []
    rest = iter(more)
    for number, message in enumerate(messages, 1):
        where = f"{at}message {number}"
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise InputError(f"{where} is {message!r:.80}; expected a 'role' and a 'content'")
        role = str(message["role"])
        role = _OTHER_NAMES.get(role, role)
        if role not in ROLES:
            raise InputError(f"{where} has the role {role!r}; expected {', '.join(ROLES)}")
        content = message["content"]
        if role != "user" and isinstance(content, str):  # no image is meant
            content = content.replace(PLACEHOLDER, "")
        text, images = _content(content, where, rest, find)
        if images and role != "user":
            raise InputError(f"{where} is of the {role} and has an image; give it to the user")
        turns.append(Turn(role, text, len(images)))
        sources += images
    if turns[-1].role != "user":
        raise InputError(f"{at}the last message is of the {turns[-1].role}; expected the user's")
    if list(rest):
        raise InputError(
            f"{at}{counted(len(more), 'image')} given, and the messages name {len(sources)}; "
            f"write {PLACEHOLDER} in a text, or a part of type 'image', for each"
        )
    return turns, sources


def _content(
    content: Any, where: str, rest: Iterable[Any], find: Callable[[str], str]
) -> tuple[str, list[ImageSource]]:
    """The text of a message, with a placeholder per image, and its images."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, (list, tuple)):
        raise InputError(f"{where} has the content {content!r:.80}; expected a text or a list")
    texts: list[str] = []
    images: list[ImageSource] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        kind = _OTHER_NAMES.get(str(kind), kind)
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
            found = [_next(rest, where) for _ in range(part["text"].count(PLACEHOLDER))]
        elif kind in ("image", "image_url", "video", "video_url"):
            texts.append(PLACEHOLDER)
            found = [_named(part, kind, where, rest)]
        else:
            raise InputError(
                f"{where} has the part {part!r:.80}; expected text, or an image as "
                "{'type': 'image_url', 'image_url': {'url': ...}} or {'type': 'image', 'image': "
                "...}, or the same with video"
            )
        video = str(kind).startswith("video")
        images += [
            source_of(one, f"{where}, image {len(images) + 1}", find, video) for one in found
        ]
    return "".join(texts), images


def _next(rest: Any, where: str) -> Any:
    for found in rest:
        return found
    raise InputError(f"{where} has more placeholders than there are images; give an image for each")


def _named(part: Mapping[str, Any], kind: str, where: str, rest: Any) -> Any:
    given = [part[name] for name in (kind, "image", "path", "url") if part.get(name) is not None]
    if not given:
        return _next(rest, where)
    found = given[0]
    return found.get("url") if isinstance(found, Mapping) else found


def source_of(item: Any, name: str, find: Callable[[str], str], video: bool = False) -> ImageSource:
    """Makes the source of an image: a path, a data URL, or what `image_source` takes.

    Args:
        item: The image.
        name: Name of an image without a path, for errors.
        find: Makes a path absolute.
        video: Whether it is a video, which has a path.

    Raises:
        InputError: It is another address, a data URL that cannot be read, or a video without a
            path.
    """
    if video and (not isinstance(item, (str, os.PathLike)) or _DATA.match(os.fspath(item))):
        raise InputError(f"{name} is a video without a path; expected the path of its file")
    if not isinstance(item, (str, os.PathLike)):
        return image_source(item, name)
    path = os.fspath(item)
    if not (match := _DATA.match(path)):
        try:
            refuse_address(path)
        except InputError as error:
            raise InputError(f"{name}, {path!r:.80}, {error}") from error
        return image_source(find(path), name, video)
    try:
        if not match[1]:
            raise binascii.Error("it is not base64")
        data = base64.b64decode(path[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"{name} is a data URL that cannot be read: {error}; expected "
            "'data:image/png;base64,...'"
        ) from error
    identity = hashlib.blake2b(data, digest_size=16).hexdigest()
    return ImageSource(f"data:{identity}", partial(read_image, data, name), identity)


def counted(count: int, noun: str) -> str:
    """A number and its noun, for messages: ``1 image``, ``2 images``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def as_messages(history: Sequence[Turn], text: str) -> list[dict[str, str]]:
    """A conversation as messages that `turns_of` reads, with its images given apart.

    Args:
        history: Its earlier messages; if there are none, there is no conversation: no messages.
        text: The user's last message.
    """
    if not history:
        return []
    earlier = [{"role": turn.role, "content": turn.text} for turn in history]
    return [*earlier, {"role": "user", "content": text}]
