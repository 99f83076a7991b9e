"""Finds checkpoints by name: a folder, a Hub id or its short name, ``zoo:NAME`` or ``SCHEME:NAME``.

``zoo:NAME`` is a model that ships with the package. A scheme, such as ``moonshine`` in
``moonshine:tiny-en``, is a registered class of the kind ``checkpoints``; plug-ins can add schemes.
"""

from __future__ import annotations

import functools
import os
import re
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar
from warnings import warn

from mmdecode import registry
from mmdecode.errors import (
    InputError,
    MMDecodeError,
    OptionError,
    UnknownNameError,
    did_you_mean,
)
from mmdecode.model_names import REAL, SHORT, SYNTHETIC, full_name
from mmdecode.no_models import refuse_part, refuse_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from transformers import PreTrainedModel

    Model = TypeVar("Model", bound=PreTrainedModel)

Arguments = ParamSpec("Arguments")
Loaded = TypeVar("Loaded")

ZOO = Path(__file__).parent / "zoo" / "models"

NAMES = "a folder, a Hub id, zoo:NAME or moonshine:tiny-en"
"""Ways to name a checkpoint, for messages."""

HUB_TIMEOUT_S = 2.0
"""Seconds to wait for the Hub's answer whether it has a model."""

_CODE_TRUSTED: ContextVar[bool] = ContextVar("code_trusted", default=False)


def code_trusted() -> bool:
    """Returns whether Python files of a checkpoint may be run: only inside `trusting_code`.

    Every ``from_pretrained`` gets this value as ``trust_remote_code``; without the argument
    transformers would ask on standard input, which commands may read data from.
    """
    return _CODE_TRUSTED.get()


@contextmanager
def trusting_code(trust: bool = True) -> Iterator[None]:
    """Allows checkpoints that are loaded inside the context to run their own Python files.

    Args:
        trust: Whether to allow it; ``False`` changes nothing, also in an outer context that allows.
    """
    before = _CODE_TRUSTED.set(trust or _CODE_TRUSTED.get())
    try:
        yield
    finally:
        _CODE_TRUSTED.reset(before)


def trusting_as_asked(load: Callable[Arguments, Loaded]) -> Callable[Arguments, Loaded]:
    """Decorates a loader to run in `trusting_code` if it gets ``trust_remote_code=True``."""

    @functools.wraps(load)
    def loads(*args: Arguments.args, **given: Arguments.kwargs) -> Loaded:
        with trusting_code(bool(given.get("trust_remote_code", False))):
            return load(*args, **given)

    return loads


def zoo_names() -> list[str]:
    """Returns the names of the shipped models, without the prefix ``zoo:``."""
    return sorted(p.parent.name for p in ZOO.glob("*/config.json"))


def cache_folder() -> Path:
    """Returns the cache folder, for files that are made once and reused by later runs.

    It is ``MMDECODE_CACHE``, else ``mmdecode`` in ``XDG_CACHE_HOME``, else ``~/.cache/mmdecode``.

    Raises:
        InputError: Neither variable is set, and the user has no home folder.
    """
    own, shared = os.environ.get("MMDECODE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared or "~/.cache") / "mmdecode"
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise InputError(
            f"no cache folder: this user has no home folder ({folder}); set MMDECODE_CACHE to one"
        ) from error


class CheckpointScheme:
    """Base of classes that find or make the checkpoints named ``SCHEME:NAME``.

    The subclass's module is imported to resolve or list names; it must not import large libraries.

    Attributes:
        names: Names of the scheme's checkpoints, without ``SCHEME:``.
    """

    names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def folder(cls, name: str) -> Path:
        """Returns a folder that transformers can load; creates it if it does not exist.

        Raises:
            UnknownNameError: The scheme has no checkpoint of that name.
            InputError: Files that the checkpoint is made from are not installed, or are damaged.
        """
        raise NotImplementedError

    @classmethod
    def is_installed(cls, name: str) -> bool:
        """Returns whether the files that `folder` needs are installed; must be fast."""
        return False

    @classmethod
    def cached(cls, name: str) -> Path | None:
        """Folder of the user's cache that has it where the environment does not; else ``None``."""
        return None

    @classmethod
    def holds(cls, folder: Path) -> bool:
        """Returns whether a folder has the files for a checkpoint, so that it can be ``NAME``."""
        return False

    @classmethod
    def card(cls, name: str) -> dict[str, Any]:
        """Returns the facts that ``mmdecode zoo`` shows.

        Returns:
            ``what``, ``measured``, ``licence``, ``origin``, ``notice``, ``install`` (a command) and
            ``mib``, the size of the checkpoint's folder.
        """
        return {}


def scheme_names() -> list[str]:
    """Returns the names of all checkpoints of all schemes, as ``SCHEME:NAME``."""
    return [
        f"{scheme}:{name}" for scheme, cls in registry.classes("checkpoints") for name in cls.names
    ]


def scheme_card(name: str) -> dict[str, Any]:
    """Returns the card of ``SCHEME:NAME``, see `CheckpointScheme.card`, and a key ``installed``."""
    scheme, rest = _scheme_of(name)
    return {} if scheme is None else scheme.card(rest) | {"installed": scheme.is_installed(rest)}


def cached_folder(name: str) -> Path | None:
    """Folder of the user's cache that alone has ``SCHEME:NAME``; ``None``: there is none."""
    scheme, rest = _scheme_of(name)
    return None if scheme is None else scheme.cached(rest)


def is_installed(name: str) -> bool:
    """Returns whether a checkpoint can be loaded without installing or downloading anything.

    Args:
        name: ``SCHEME:NAME``, ``zoo:NAME`` or a folder; ``False`` for every Hub id.
    """
    if name.startswith("zoo:"):
        return name[4:] in zoo_names()
    scheme, rest = _scheme_of(name)
    return scheme.is_installed(rest) if scheme else Path(name).expanduser().is_dir()


def _scheme_of(name: str) -> tuple[Any, str]:
    """Returns the class of a name's scheme (``None``: no scheme), and the rest of the name."""
    scheme, colon, rest = name.partition(":")
    if not (colon and re.fullmatch(r"\w[\w.-]+", scheme)):
        return None, rest
    known = scheme in registry.names("checkpoints")
    return registry.resolve("checkpoints", scheme)[0] if known else None, rest


def _prepared(folder: Path) -> Path:
    """Returns a folder that transformers can load; converts it if it has files of a scheme."""
    if not (folder / "config.json").exists():
        for _, scheme in registry.classes("checkpoints"):
            if scheme.holds(folder):
                return scheme.folder(f"{folder.absolute()}")
    return folder


def paired(model_id: str | None, what: str) -> str | None:
    """Returns the shipped drafter of ``zoo:NAME`` or ``SCHEME:NAME``, as ``zoo:...-WHAT``."""
    found = f"{model_id}-{what}".removeprefix("zoo:").replace(":", "-")
    return f"zoo:{found}" if ":" in str(model_id) and found in zoo_names() else None


def local_path(name: str | Path) -> str:
    """Resolves a name to an argument of ``from_pretrained``: a folder, or an existing Hub id.

    If the Hub cannot be reached, a Hub id resolves to the folder of its files in the cache.

    Args:
        name: A folder, a Hub id, a short name of `mmdecode.model_names`, ``zoo:NAME`` or a name of
            `scheme_names`. An existing folder takes precedence over a short name.

    Raises:
        UnknownNameError: ``zoo:NAME`` is not shipped, or a scheme has no such checkpoint.
        InputError: A path that looks like a folder does not exist, the Hub has no such model, or
            it cannot be reached and the cache does not hold the model.
    """
    text = str(name)
    if text.startswith("zoo:"):
        if text[4:] not in zoo_names():
            raise UnknownNameError.of("zoo model", text[4:], zoo_names())
        return str(ZOO / text[4:])
    scheme, rest = _scheme_of(text)
    if scheme:
        return str(scheme.folder(rest))
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1
    path = Path(text).expanduser()
    if looks_local and not path.exists():
        raise InputError(f"model folder {text!r} does not exist; give {NAMES}")
    full = full_name(text)
    return str(_prepared(path)) if path.exists() and full == text else _hub_path(full)


def _hub_path(name: str) -> str:
    """Returns a Hub id or, if the Hub cannot be reached, the cached folder of its files.

    Raises:
        InputError: The model does not exist, or the Hub cannot be reached and the cache lacks it.
    """
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        _ask_hub(name)
        return name
    except ConnectionError as error:
        try:
            return huggingface_hub.snapshot_download(name, local_files_only=True)
        except LocalEntryNotFoundError:
            raise InputError(
                f"model {name!r} cannot be loaded: there is no such folder, its files are not in "
                f"the cache, and {error}{_meant(name)}; give a folder, zoo:NAME or "
                "moonshine:tiny-en, or download it where there is a connection, with "
                f"'hf download {name}'"
            ) from error


@functools.cache
def _ask_hub(name: str) -> None:
    """Asks the Hub whether it has a model, and waits at most `HUB_TIMEOUT_S` for the answer.

    Without this check, transformers retries an unreachable Hub for more than 20 s, and then reports
    that the model does not exist.

    Raises:
        InputError: The Hub has no such model, or this user has no access to it.
        ConnectionError: The Hub cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        url = huggingface_hub.hf_hub_url(name, "config.json")
        huggingface_hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S)
    except EntryNotFoundError:
        return  # a model without a config.json
    except GatedRepoError as error:
        raise InputError(
            f"model {name!r} cannot be loaded: access must be requested; request it at "
            f"https://huggingface.co/{name} and log in with 'hf auth login'"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise InputError(
            f"model {name!r} cannot be loaded: there is no such folder, and no such model on the "
            f"Hub{_meant(name)}; give {NAMES}; for a private model log in with 'hf auth login'"
        ) from error
    except OfflineModeIsEnabled as error:
        raise ConnectionError("HF_HUB_OFFLINE is set, so the Hub is not asked") from error
    except HfHubHTTPError as error:
        code = error.response.status_code
        raise ConnectionError(f"the Hub answers with an error ({code})") from error
    except Exception as error:  # an error of its HTTP client, whose class depends on the version
        reason = f"{error}" or type(error).__name__
        raise ConnectionError(f"the Hub cannot be reached ({reason})") from error


def _meant(name: str) -> str:
    """Returns a suggestion of similar names for a message; empty if the name is known."""
    shipped = (f"zoo:{one}" for one in zoo_names())
    known = {*SHORT, *SHORT.values(), *shipped, *scheme_names()}
    return "" if name in known else did_you_mean(name, known, cutoff=0.6)


AUTO = "auto"
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Names of floating dtypes in torch, by short name."""


def dtype_of(
    name: str | torch.dtype | None,
    model_id: str | os.PathLike[str] = "",
    device: str | torch.device | None = None,
) -> torch.dtype:
    """Resolves the name of a floating dtype.

    Args:
        name: ``auto``, one of `DTYPES`, torch's own name, or a dtype; ``None``: float32. ``auto``
            is float32 on a CPU and for ``zoo:`` models; on CUDA it is float16 for a checkpoint in
            float16, else bfloat16, or float16 on a GPU without bfloat16.
        model_id: Name of the checkpoint, for ``auto``.
        device: Device that the model will run on, for ``auto``.

    Raises:
        OptionError: ``name`` is no floating dtype.
    """
    import torch

    if name == AUTO:
        return _chosen_dtype(str(model_id), device_of(device))
    known = {*DTYPES, *DTYPES.values()}
    if isinstance(name, str) and name not in known:
        raise OptionError(
            f"dtype={name!r}{did_you_mean(name, [AUTO, *known])}; expected auto, "
            f"{', '.join(DTYPES)} or torch's {', '.join(DTYPES.values())}; 8-bit weights are "
            "quantize='int8' (--quantize int8)"
        )
    kind = getattr(torch, DTYPES.get(name, name)) if isinstance(name, str) else name
    kind = torch.float32 if kind is None else kind
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise OptionError(f"dtype={name!r}; expected float32, bfloat16 or float16")
    if kind.itemsize == 2 and device is not None and device_of(device).type == "cpu":
        _warn_of_halves(kind)
    return kind


def _warn_of_halves(kind: torch.dtype) -> None:
    """Warns where this processor multiplies a 16-bit dtype more slowly than float32."""
    from mmdecode.quantization.products import gain

    short = str(kind).removeprefix("torch.")
    if gain(short) < 1:
        warn(
            f"this processor multiplies a row in {short} in {1 / gain(short):.1f} times the time "
            "of float32: models need half the memory, and are slower; leave out dtype for speed",
            stacklevel=3,
        )


def _chosen_dtype(model_id: str, device: torch.device) -> torch.dtype:
    """Returns the dtype that ``auto`` stands for; see `dtype_of`."""
    import torch

    if device.type != "cuda" or model_id.startswith("zoo:") or not model_id:
        return torch.float32
    with loading(model_id):
        config = config_of(local_path(model_id))
    if config.model_type == "var":  # its running sums need float32
        return torch.float32
    # a composite config may name the dtype only in its text model's config
    own = [getattr(part, "dtype", None) for part in (config, config.get_text_config())]
    found = next((kind for kind in own if kind is not None), None)
    half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.float16 if found in (torch.float16, "float16") else half


def device_of(name: str | torch.device | None) -> torch.device:
    """Resolves the name of a device, and checks that it can be used.

    Args:
        name: A device name of torch; ``None`` and ``auto``: CUDA if available, else the CPU.

    Raises:
        OptionError: The device does not exist on this machine.
    """
    import torch

    if name is None or name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(
            f"device {name!r} is not known; expected auto, cpu, cuda, cuda:N or mps"
        ) from error
    there = {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    count = there.get(device.type)
    if count is not None and (device.index or 0) >= count:
        raise OptionError(
            f"device {str(name)!r} cannot be used: this machine has {count} of type "
            f"{device.type}; give auto, cpu or an existing device"
        )
    return device


def placed(model: Any, device: str | torch.device | None, quantize: str | None = None) -> Any:
    """Moves a model to a device, and rounds its weights there if that is asked for.

    Args:
        model: A module, in evaluation mode if it is rounded.
        device: ``None`` and ``auto``: CUDA if available, else the CPU.
        quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.

    Raises:
        OptionError: The device cannot be used, or there is no such format.
        UnsupportedModelError: The model cannot be rounded, or was on a CPU and is to leave it.
    """
    from mmdecode.quantization import models as quantization

    where = device_of(device)
    quantization.refuse_device(model, where)
    try:
        model = model.to(where)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {device!r} cannot be used: {error}") from error
    return model if quantize is None else quantization.quantize(model, quantize)


@contextmanager
def loading(model_id: str) -> Iterator[None]:
    """Turns errors that transformers raises while it loads a checkpoint into `InputError`.

    Inside the context transformers also knows the format of `mmdecode.quantize`.

    Raises:
        InputError: The checkpoint cannot be loaded.
    """
    import mmdecode.quantization  # noqa: F401, registers the format

    try:
        yield
    except MMDecodeError:
        raise
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"model {model_id!r} cannot be loaded: it needs its own Python files, which are "
                "not run by default; read its .py files, and if you trust them give "
                "--trust-remote-code, in Python trust_remote_code=True"
            ) from error
        refuse_unfinished(model_id)
        zoo = model_id.startswith("zoo:")
        refuse_part(model_id, ZOO / model_id[4:] if zoo else Path(model_id))
        raise InputError(
            f"model {model_id!r} cannot be loaded: {' '.join(str(error).split())[:300]}; give "
            f"{NAMES}; a Hub id must exist and be accessible"
        ) from error


def config_of(path: str) -> Any:
    """Returns the transformers configuration of a checkpoint.

    Raises:
        InputError: The configuration cannot be read.
    """
    from transformers import AutoConfig

    with loading(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=code_trusted())


def default_recogniser() -> str:
    """Returns the default recogniser: Moonshine if it is installed, else the shipped Whisper."""
    return REAL if is_installed(REAL) else SYNTHETIC
