import json

import pytest
import torch

from mmdecode.draft.medusa import Medusa
from mmdecode.errors import InputError, OptionError
from mmdecode.train.drafters.medusa import MedusaOptions, train_from_manifest
from mmdecode.zoo.speech import speech_test


@pytest.fixture
def manifest(tmp_path):
    clips = speech_test()[:24]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"path": str(clip.path)}) for clip in clips) + "\n")
    return file


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "dtype"), [("linear", "bfloat16"), ("block", "float32")])
def test_heads_are_trained_from_recordings_and_load_as_a_draft(kind, dtype, manifest, tmp_path):
    options = MedusaOptions(kind=kind, num_heads=3, epochs=2, nodes=5, batch=8)
    report = train_from_manifest(
        "zoo:whisper-synth", manifest, tmp_path / "heads", options, dtype=dtype
    )
    assert report["dtype"] == dtype
    assert len(report["accuracy_by_head_and_rank"]) == 3
    assert not (tmp_path / "heads" / "state").exists()
    draft = Medusa.from_pretrained(tmp_path / "heads")
    assert (draft.block is None) == (kind == "linear")
    assert len(draft.paths) == 5
    assert all(torch.isfinite(p).all() for p in draft.heads.parameters())


def test_a_manifest_without_paths_and_unknown_kinds_are_refused(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "no audio"}\n')
    with pytest.raises(InputError, match="path"):
        train_from_manifest("zoo:whisper-synth", file, tmp_path / "heads", MedusaOptions())
    with pytest.raises(OptionError, match="block"):
        MedusaOptions(kind="tree")
