"""Models for lm-eval and lmms-eval, so that their tasks run with the decoders of this package.

    python -m mmdecode.evaluation.harnesses lm_eval run --model mmdecode
        --model_args pretrained=MODEL,draft=lookup --tasks gsm8k
    python -m lmms_eval --model mmdecode
        --model_args pretrained=MODEL,base=llava_hf,guide=vcd --tasks pope

lmms-eval finds the model by its entry point; lm-eval has none, and is started by this module. Both
classes are those of the harness for models of transformers, with their arguments, prompts and
batches; only ``model.generate`` is ours. Log-likelihoods are the plain model's: a guide changes
what is generated alone.
"""

from __future__ import annotations

import functools
import runpy
import sys
from typing import Any

from mmdecode.errors import MMDecodeError, OptionError

NAME = "mmdecode"
PARTS = ("draft", "guide", "accept", "seed")


def with_decoder(base: Any) -> type:
    """Returns a harness's class whose model generates by a `mmdecode.Decoder`.

    Args:
        base: Class of a harness for models of transformers; it is called with ``pretrained`` and
            its own arguments, and has the attributes ``model`` and ``tokenizer`` then.

    Returns:
        A subclass that also takes ``draft``, ``guide``, ``accept`` and ``seed``, as text.
    """

    def __init__(self: Any, pretrained: str, **options: Any) -> None:
        from mmdecode import registry
        from mmdecode.api import attach
        from mmdecode.checkpoints import local_path
        from mmdecode.decoder import Decoder

        parts = {name: options.pop(name) for name in PARTS if name in options}
        base.__init__(self, pretrained=str(local_path(pretrained)), **options)
        at_hand = registry.context_of(self.model, self.tokenizer, pretrained)
        made = {
            name: registry.create(name, parts[name], **at_hand)
            for name in ("draft", "guide")
            if parts.get(name)
        }
        self.decoder = Decoder(**made, accept=parts.get("accept", "auto"), seed=parts.get("seed"))
        attach(self.model).__enter__()  # for as long as the model lives
        self.model.generate = functools.partial(self.model.generate, custom_generate=self.decoder)

    return type(f"MMDecode{base.__name__}", (base,), {"__init__": __init__, "__doc__": __doc__})


def __getattr__(name: str) -> Any:
    """Builds ``LM`` for lm-eval, and ``LMM`` and its manifest for lmms-eval, when they are used."""
    if name not in ("LM", "LMM", "MANIFEST"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "LM":
            from lm_eval.models.huggingface import HFLM

            return with_decoder(HFLM)
        from lmms_eval.api.model import lmms
        from lmms_eval.models import get_model
        from lmms_eval.models.registry_v2 import ModelManifest
    except ImportError as error:
        raise MMDecodeError(
            f"{name} needs a harness ({error}); install it with: pip install lm-eval lmms-eval"
        ) from error
    if name == "MANIFEST":
        return ModelManifest(model_id=NAME, chat_class_path=f"{__name__}.LMM")

    class LMM(lmms):
        """Model of lmms-eval; ``base`` names the harness's class for the model's family."""

        is_simple = False

        def __new__(cls, pretrained: str, base: str = "llava_hf", **options: Any) -> Any:
            return with_decoder(get_model(base))(pretrained, **options)

    return LMM


def main() -> None:
    """Runs the command line of lm-eval, which then knows the model ``mmdecode``."""
    if sys.argv[1:2] != ["lm_eval"]:
        raise OptionError("expected: python -m mmdecode.evaluation.harnesses lm_eval ARGUMENTS...")
    from lm_eval.api.registry import register_model

    register_model(NAME)(__getattr__("LM"))
    del sys.argv[1]
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
