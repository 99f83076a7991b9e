"""Loads checkpoints of image models, by the ``model_type`` of their configuration.

A LlamaGen folder has its image tokenizer under ``vq``, or its configuration names another folder; a
caption-conditional LlamaGen also has its text encoder under ``text_encoder`` and the files of the
text tokenizer next to the model's files. A Chameleon folder may have a decoder to pixels under
``vq``. Class names come from ``id2label`` in the configuration. ``generation_config.json`` of a
LlamaGen or VAR model may set the default ``guidance_scale`` (for VAR at the last scale),
``temperature``, ``top_k`` and ``top_p``; it overrides the defaults of the model family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmdecode import registry
from mmdecode.checkpoints import code_trusted, dtype_of, loading, local_path, placed
from mmdecode.errors import IncompatibleError, InputError, OptionError, UnsupportedModelError
from mmdecode.models import llamagen
from mmdecode.models.chameleon_vq import ChameleonVQDecoder
from mmdecode.models.llamagen import LlamaGenForImageGeneration
from mmdecode.models.multiscale_vq import MultiScaleVQ
from mmdecode.models.var import VarForImageGeneration
from mmdecode.models.vq import VQModel

if TYPE_CHECKING:
    from mmdecode.adapters.images.base import ImageAdapter, Preset

_OF_A_CHAT = ("janus",)  # families whose published code puts image prompts into the chat template


@dataclass(frozen=True, kw_only=True)
class RasterModel:
    """A model of image tokens in raster order, with its input functions and default settings.

    Attributes:
        adapter: Adapter of the model.
        given: Turns classes or prompts, one per image, into arguments of the adapter's
            ``condition``.
        classes: Number of classes; 0: the model takes prompts.
        labels: Class names by number; empty if the configuration has none.
        preset: Default guidance and sampling.
        steered: Turns a negative prompt into arguments of the adapter's ``condition``; ``None``:
            the model takes no negative prompt.
    """

    adapter: ImageAdapter
    given: Callable[[Sequence[Any]], Mapping[str, Any]]
    preset: Preset
    classes: int = 0
    labels: Mapping[int, str] = field(default_factory=dict)
    steered: Callable[[str], Mapping[str, Any]] | None = None

    def away_from(self, text: str) -> RasterModel:
        """Returns a copy of the model whose unconditional branch reads a negative prompt.

        Raises:
            OptionError: The model takes no negative prompt.
        """
        if self.steered is None:
            raise OptionError(
                f"negative_prompt={text!r}: the unconditional input of {self.adapter.name} is "
                "learned and cannot be a text; leave the negative prompt out"
            )
        given, more = self.given, self.steered(text)
        return replace(self, given=lambda conditions: {**given(conditions), **more})


def config_of(model_id: str) -> Any:
    """Returns the transformers configuration of a checkpoint.

    Raises:
        InputError: The configuration cannot be read, or ``model_id`` is a file.
    """
    from transformers import AutoConfig

    path = local_path(model_id)
    if Path(path).is_file():
        raise InputError(
            f"{model_id} is a file; expected a folder with config.json: read a published "
            "checkpoint with load_published of mmdecode.models.llamagen, .vq, .var or "
            ".multiscale_vq, and save it with save_pretrained"
        )
    with loading(model_id):
        return AutoConfig.from_pretrained(path, trust_remote_code=code_trusted())


def load(
    model_id: str,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    grid: tuple[int, int] | None = None,
    template: bool = True,
) -> RasterModel:
    """Loads a raster model.

    Args:
        model_id: A folder, a Hub id or ``zoo:NAME``.
        device: Device of the model; ``None``: CUDA if available, else the CPU.
        dtype: ``None``: float32; ``auto``: see `mmdecode.checkpoints.dtype_of`.
        quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.
        grid: Rows and columns of codes, for model families whose images may have any size.
        template: Whether prompts are put into the processor's chat template, for families whose
            published code does so (Janus); ``False``: the model reads prompts unchanged.

    Raises:
        InputError: The checkpoint cannot be loaded, or a part is missing.
        IncompatibleError: The image tokenizer has another codebook than the model.
        OptionError: Device, dtype or format do not exist; the model needs a grid, or has a fixed
            one.
        UnsupportedModelError: No adapter supports the model, or it has no int8 form.
    """
    if config_of(model_id).model_type == llamagen.LlamaGenConfig.model_type:
        if grid is not None:
            raise OptionError(f"{model_id} generates images of one size; leave out the grid")
        return _llamagen(model_id, device, dtype, quantize)
    return _of_transformers(model_id, device, dtype, quantize, grid, template)


def load_scales(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
) -> tuple[VarForImageGeneration, MultiScaleVQ]:
    """Loads a next-scale transformer and the tokenizer that its configuration names.

    Published checkpoints have loaders of their own, `mmdecode.models.var.load_published` and
    `mmdecode.models.multiscale_vq.load_published`.

    Args:
        name: A folder, a Hub id or ``zoo:NAME``.
        device: Device of model and tokenizer; ``None``: CUDA if available, else the CPU.
        dtype: Data type of the transformer; the tokenizer is always in float32, since it sums the
            latents of all scales.
        quantize: Refused unless ``None``: a whole scale attends at once, not query by query.

    Raises:
        InputError: The model does not exist, weights are missing, or the configuration does not
            name the tokenizer.
        OptionError: The device or the dtype does not exist.
        UnsupportedModelError: ``quantize`` is given.
    """
    if quantize is not None:
        raise UnsupportedModelError(
            f"{name} generates images scale by scale and has no int8 form; leave out "
            f"quantize={quantize!r}"
        )
    model = whole(VarForImageGeneration, str(name), dtype=dtype_of(dtype, name, device))
    if not model.config.tokenizer:
        raise InputError(
            f"{name} does not name its tokenizer; write the tokenizer's folder into config.json as "
            "'tokenizer', or load model and tokenizer separately and pass them to NextScale"
        )
    folder = Path(local_path(name)) / model.config.tokenizer
    source = str(folder) if folder.is_dir() else model.config.tokenizer
    return placed(model, device), placed(whole(MultiScaleVQ, source, dtype=torch.float32), device)


def whole(cls: Any, model_id: str, subfolder: str = "", **options: Any) -> Any:
    """Loads a model of this package and checks that the checkpoint has exactly its weights.

    Raises:
        InputError: The checkpoint cannot be loaded, or weights are missing, unknown or of another
            shape.
    """
    with loading(model_id):
        model, found = cls.from_pretrained(
            local_path(model_id),
            subfolder=subfolder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=code_trusted(),
            **options,
        )
    wrong = [
        f"{what} {sorted(map(str, found[key]))[0]}"
        for what, key in (
            ("without", "missing_keys"),
            ("with an unknown", "unexpected_keys"),
            ("with another shape of", "mismatched_keys"),
        )
        if found[key]
    ]
    if wrong:
        raise InputError(
            f"{model_id}{'/' * bool(subfolder)}{subfolder} is no {cls.__name__} as configured in "
            f"its config.json: {'; '.join(wrong)}; give the configuration it was trained with, or "
            "convert the checkpoint again with load_published and save_pretrained"
        )
    return model.eval()


def labels_of(config: Any, classes: int) -> dict[int, str]:
    """Returns class names by number; empty if the configuration has only default names."""
    found = {int(label): name for label, name in (config.id2label or {}).items()}
    if len(found) != classes or found == {label: f"LABEL_{label}" for label in found}:
        return {}
    return found


def generation_settings(model_id: str) -> dict[str, Any]:
    """Returns the guidance and sampling settings in ``generation_config.json``, if any."""
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(local_path(model_id))
    except OSError:
        return {}
    names = ("temperature", "top_k", "top_p")
    found = {"guidance": config.guidance_scale, **{name: getattr(config, name) for name in names}}
    return {name: value for name, value in found.items() if value is not None}


def with_generation_settings(model_id: str, preset: Preset) -> Preset:
    """Returns the preset, overridden by the checkpoint's ``generation_config.json``."""
    settings = generation_settings(model_id)
    return replace(
        preset,
        guidance=float(settings.pop("guidance", preset.guidance)),
        sampling={**preset.sampling, **settings},
    )


def _llamagen(
    model_id: str,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    quantize: str | None,
) -> RasterModel:
    kind = dtype_of(dtype, model_id, device)
    model = placed(whole(LlamaGenForImageGeneration, model_id, dtype=kind), device, quantize)
    vq = None
    if _holds(model_id, model.config.tokenizer):
        vq = placed(whole(VQModel, model_id, model.config.tokenizer, dtype=kind), device)
    adapter = registry.image_adapter_for(model, vq=vq)
    preset = with_generation_settings(model_id, adapter.preset)
    config = model.config
    if config.num_classes:
        return RasterModel(
            adapter=adapter,
            given=lambda classes: {"classes": classes},
            preset=preset,
            classes=config.num_classes,
            labels=labels_of(config, config.num_classes),
        )
    return RasterModel(adapter=adapter, given=_captions(model_id, model), preset=preset)


def _captions(model_id: str, model: Any) -> Callable[[Sequence[str]], Mapping[str, Any]]:
    from transformers import AutoTokenizer, T5EncoderModel

    if not _holds(model_id, "text_encoder"):
        raise InputError(
            f"{model_id} is caption-conditional and has no folder text_encoder; save the "
            "T5EncoderModel it was trained with there, and its tokenizer next to the model"
        )
    encoder = placed(
        whole(T5EncoderModel, model_id, "text_encoder", dtype=model.dtype), model.device
    )
    width, wanted = encoder.config.d_model, model.config.caption_size
    if width != wanted:
        raise IncompatibleError.between(
            f"{model_id}/text_encoder",
            model_id,
            f"its states have width {width}, and the model reads width {wanted}",
            "give the text encoder that the model was trained with",
        )
    with loading(model_id):
        tokenizer = AutoTokenizer.from_pretrained(
            local_path(model_id), trust_remote_code=code_trusted()
        )

    @lru_cache(maxsize=64)
    @torch.no_grad()
    def read(text: str) -> Tensor:
        # captions are encoded one by one, so that features do not depend on the batch
        ids = tokenizer([text], return_tensors="pt")["input_ids"].to(model.device)
        return encoder(input_ids=ids).last_hidden_state[0]

    def given(texts: Sequence[str]) -> Mapping[str, Any]:
        found = [read(text) for text in texts]
        masks = [features.new_ones(len(features)) for features in found]
        return {
            "features": pad_sequence(found, batch_first=True),
            "mask": pad_sequence(masks, batch_first=True),
        }

    return given


def _of_transformers(
    model_id: str,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    quantize: str | None,
    grid: tuple[int, int] | None,
    template: bool,
) -> RasterModel:
    """Loads an image model of transformers, with its processor unless it is unconditional."""
    import transformers

    config = config_of(model_id)
    registry.image_adapter_class(SimpleNamespace(config=config))  # refuse before loading
    path = local_path(model_id)
    unconditional = config.model_type == "imagegpt"
    auto: Any = transformers.AutoModelForImageTextToText
    options: dict[str, Any] = {}
    if unconditional:
        auto = transformers.ImageGPTForCausalImageModeling
        options["clusters"] = _clusters(path)
    if grid is not None:
        options["grid"] = grid
    elif config.model_type == "emu3":
        raise OptionError(
            f"{model_id} generates images of any size; give the number of codes with grid=(rows, "
            "columns) or --codes ROWSxCOLUMNS, such as 90x90"
        )
    if config.model_type == "chameleon" and _holds(model_id, "vq"):
        options["vq"] = placed(whole(ChameleonVQDecoder, model_id, "vq"), device)
    with loading(model_id):
        kind = dtype_of(dtype, model_id, device)
        model = auto.from_pretrained(path, dtype=kind, trust_remote_code=code_trusted())
    adapter = registry.image_adapter_for(placed(model.eval(), device, quantize), **options)
    if unconditional:
        return RasterModel(
            adapter=adapter,
            given=lambda classes: {"count": len(classes)},
            preset=adapter.preset,
            classes=1,
        )
    with loading(model_id):
        processor = transformers.AutoProcessor.from_pretrained(
            path, trust_remote_code=code_trusted()
        )
    of_a_chat = template and config.model_type in _OF_A_CHAT
    templated = of_a_chat and bool(getattr(processor, "chat_template", None))

    def read(text: str) -> str:
        if not templated:
            return text
        turn = {"role": "user", "content": [{"type": "text", "text": text}]}
        return processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)

    return RasterModel(
        adapter=adapter,
        given=lambda prompts: {"prompt": [read(one) for one in prompts], "tokenizer": processor},
        preset=adapter.preset,
        steered=lambda text: {"negative_prompt": read(text)},
    )


def _clusters(path: str) -> Any:
    """Returns the colours of ImageGPT's tokens from ``preprocessor_config.json``, if it exists."""
    from transformers.utils import cached_file

    try:
        file = cached_file(path, "preprocessor_config.json")
    except OSError:
        return None
    return json.loads(Path(file).read_text(encoding="utf-8")).get("clusters") if file else None


def _holds(model_id: str, subfolder: str) -> bool:
    """Returns whether a subfolder of a checkpoint has a ``config.json``."""
    from transformers.utils import cached_file

    try:
        return bool(cached_file(local_path(model_id), f"{subfolder}/config.json"))
    except OSError:
        return False
