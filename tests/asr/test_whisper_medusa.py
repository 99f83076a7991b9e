import shutil
from pathlib import Path

import pytest

from mmdecode.asr.transcriber import load
from mmdecode.draft.medusa import Medusa
from mmdecode.errors import OptionError
from mmdecode.models.whisper_medusa import HeadedProjection
from mmdecode.train.zoo.whisper_synth import build_processor

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "whisper_medusa"


@pytest.mark.parametrize("kind", ["linear", "block"])
def test_a_published_checkpoint_loads_as_target_and_as_its_own_draft(kind, tmp_path):
    folder = tmp_path / kind
    shutil.copytree(GOLDEN / kind, folder)
    build_processor(60).save_pretrained(folder)
    model, _ = load(str(folder), "cpu", None)
    assert isinstance(model.proj_out, HeadedProjection) == (kind == "linear")
    draft = Medusa.from_options(model_id=str(folder))
    assert (draft.block is not None) == (kind == "block")


def test_medusa_without_heads_says_what_to_give():
    with pytest.raises(OptionError, match="path="):
        Medusa.from_options()
    with pytest.raises(OptionError, match="path="):
        Medusa.from_options(model_id="zoo:nothing")
