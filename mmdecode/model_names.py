"""Short names of published models, and the Hub ids that they stand for."""

from __future__ import annotations

from pathlib import Path

REAL, SYNTHETIC = "moonshine:tiny-en", "zoo:whisper-synth"
"""Speech recognisers that need no download: for real English, and for 489 synthesised words."""

_WHISPER = {
    name: f"openai/whisper-{name}"
    for name in (
        *("tiny", "tiny.en", "base", "base.en", "small", "small.en", "medium", "medium.en"),
        *("large-v2", "large-v3", "large-v3-turbo"),
    )
} | {
    "large-v1": "openai/whisper-large",
    "large": "openai/whisper-large-v3",  # as in the command line of openai-whisper
    "turbo": "openai/whisper-large-v3-turbo",
}
_DISTIL = {
    f"distil-{name}": f"distil-whisper/distil-{name}"
    for name in ("small.en", "medium.en", "large-v2", "large-v3", "large-v3.5")
}
_VISION = {
    "llava-1.5-7b": "llava-hf/llava-1.5-7b-hf",
    "llava-1.5-13b": "llava-hf/llava-1.5-13b-hf",
    **{
        f"qwen2-vl-{size}": f"Qwen/Qwen2-VL-{size.upper()}-Instruct" for size in ("2b", "7b", "72b")
    },
    **{
        f"qwen2.5-vl-{size}": f"Qwen/Qwen2.5-VL-{size.upper()}-Instruct"
        for size in ("3b", "7b", "32b", "72b")
    },
    "smolvlm": "HuggingFaceTB/SmolVLM-Instruct",
    "janus-pro-1b": "deepseek-community/Janus-Pro-1B",
    "janus-pro-7b": "deepseek-community/Janus-Pro-7B",
}

SHORT = {
    **_WHISPER,
    **_DISTIL,
    **{f"whisper-{name}": hub_id for name, hub_id in _WHISPER.items()},
    **_VISION,
}
"""Hub ids by short name, in lower case."""


def full_name(name: str) -> str:
    """Returns the Hub id of a short name; folders and other names are returned unchanged."""
    return name if Path(name).is_dir() else SHORT.get(name.lower(), name)
