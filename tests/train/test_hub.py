"""Pushing drafters to the Hub and loading them from there; nothing here reaches a network."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError

from mmdecode import registry
from mmdecode.draft.medusa import Medusa
from mmdecode.errors import InputError, MMDecodeError, OptionError
from mmdecode.train import hub
from tests.draft.test_eagle import random_drafter
from tests.support.commands import invoke

NAME = "someone/a-drafter"
CARD = {
    "what": "eagle drafter for LlavaForConditionalGeneration",
    "model": "llava-hf/a-model",
    "data": "questions.jsonl",
    "options": {"kind": "eagle"},
    "requests": {"learnt": 900, "held_out": 32, "tested": 64},
    "precision": "bf16",
    "steps": 1200,
    "parameters_learnt": 349_000,
    "chain": 4,
    "tokens_per_pass": 3.891,
    "accepted_by_position": [0.92, 0.81],
    "entropy_bits_per_token": 1.55,
}


class Server:
    """The Hub, as far as this package asks it; folders by id."""

    def __init__(self, root):
        self.root, self.calls, self.refuses = root, [], None

    def api(self, **options):
        return SimpleNamespace(create_repo=self.create_repo, upload_folder=self.upload_folder)

    def create_repo(self, name, private=None, exist_ok=False):
        self.calls.append((name, private, exist_ok))
        if self.refuses is not None:
            raise self.refuses
        return f"https://hub/{name}"

    def upload_folder(self, repo_id, folder_path, commit_message, ignore_patterns):
        from huggingface_hub.utils import filter_repo_objects

        files = [str(p.relative_to(folder_path)) for p in Path(folder_path).rglob("*")]
        for name in filter_repo_objects(files, ignore_patterns=ignore_patterns):
            source, target = Path(folder_path) / name, self.root / repo_id / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)

    def snapshot(self, name, allow_patterns=None, **options):
        return str(self.root / name)


@pytest.fixture
def server(tmp_path, monkeypatch):
    found = Server(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", found.api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot)
    return found


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "mine"
    random_drafter().save_pretrained(path)
    (path / "card.json").write_text(json.dumps(CARD))
    (path / "state").mkdir()
    (path / "state" / "answers.jsonl").write_text("{}\n")
    return path


def test_what_was_pushed_is_loaded_by_its_id(server, folder):
    assert hub.push(folder, NAME, private=True) == f"https://hub/{NAME}"
    assert server.calls == [(NAME, True, True)]
    there = {p.name for p in (server.root / NAME).rglob("*")}
    assert there == {"README.md", "card.json", "config.json", "model.safetensors"}
    found = registry.create("draft", f"eagle:path={NAME},length=3").drafter.state_dict()
    mine = registry.create("draft", f"eagle:path={folder}").drafter.state_dict()
    assert all(torch_equal(found[name], value) for name, value in mine.items())


def torch_equal(left, right):
    return bool((left == right).all())


def test_the_page_says_what_target_numbers_and_use(server, folder):
    hub.push(folder, NAME)
    page = (server.root / NAME / "README.md").read_text()
    _, header, body = page.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "mmdecode",
        "base_model": "llava-hf/a-model",
        "tags": ["speculative-decoding", "mmdecode", "eagle"],
    }
    assert f'"llava-hf/a-model", draft="eagle:path={NAME}"' in body
    assert "on 64 requests that were not learned: 3.89" in body and "0.92, 0.81" in body
    assert "900 requests of `questions.jsonl`, 1200 steps in bf16" in body


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("eagle3", "eagle:path="), ("text", "assistant:model="), ("medusa", "medusa:path=")],
)
def test_each_kind_is_used_by_its_own_draft(kind, spec):
    page = hub.model_page({**CARD, "options": {"kind": kind}}, NAME)
    assert f'draft="{spec}{NAME}"' in page


@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("LlamaForCausalLM", f'mm.Decoder(draft="eagle:path={NAME}")'),
        ("LlamaGenForImageGeneration", 'ImageGenerator.from_pretrained("llava-hf/a-model", draft'),
    ],
)
def test_each_target_is_used_by_its_own_recipe(family, line):
    page = hub.model_page({**CARD, "what": f"eagle drafter for {family}", "data": None}, NAME)
    assert line in page and "Answerer" not in page
    assert "900 requests, 1200 steps" in page


def test_a_page_of_ones_own_is_left_as_it_is(folder):
    page = hub.write_model_page(folder, CARD)
    assert "# mine" in page.read_text()
    hub.write_model_page(folder, CARD, NAME)
    assert f"# {NAME}" in page.read_text()
    own = page.read_text().replace(hub.OURS, "").replace("tags:", "license: mit\ntags:")
    page.write_text(own)
    hub.write_model_page(folder, CARD)
    assert page.read_text() == own


def test_a_target_that_the_hub_does_not_know_is_not_linked():
    for target in ("zoo:llava-scenes", "/somewhere/a/model", "model"):
        page = hub.model_page({**CARD, "model": target}, NAME)
        assert "base_model" not in page and f"trained for `{target}`" in page
    judged = {**CARD, "requests": {"learnt": 9, "held_out": 32, "tested": 0}}
    assert "on 32 requests that were not learned: 3.89 (1 without a drafter; they also" in (
        hub.model_page(judged, NAME)
    )


def test_the_reason_of_a_failed_push_is_reported(server, folder, monkeypatch, tmp_path):
    response = SimpleNamespace(status_code=403, headers={}, request=None, text="")
    server.refuses = HfHubHTTPError("Forbidden", response=response)
    with pytest.raises(InputError, match=rf"no write permission for {NAME} \(HTTP 403\)"):
        hub.push(folder, NAME)
    response.status_code = 500
    with pytest.raises(InputError, match="refused"):
        hub.push(folder, NAME)
    server.refuses = ConnectionError("no route")
    with pytest.raises(InputError, match="cannot be reached: no route"):
        hub.push(folder, NAME)
    with pytest.raises(InputError, match=r"no config\.json"):
        hub.push(tmp_path, NAME)
    for name in ("a-drafter", "so/me/one", "someone/what is this"):
        with pytest.raises(OptionError, match=r"someone|USER/NAME|so/me"):
            hub.push(folder, name)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    server.calls.clear()
    with pytest.raises(InputError, match="HF_TOKEN"):
        hub.push(folder, NAME)
    assert not server.calls


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["eagle", "medusa", "text"])
def test_the_command_trains_and_pushes(server, tmp_path, kind):
    given = (
        "train drafter --model zoo:llava-scenes --steps 1 --batch-size 2 --held-out 1 --tested 1"
    )
    words = [*given.split(), "--limit", "3", "--kind", kind, "--out", str(tmp_path / kind)]
    found = invoke(*words, "--push", NAME, "--private")
    assert found.exit_code == 0, found.output
    assert f"pushed to https://hub/{NAME}" in found.output
    assert server.calls == [(NAME, True, True)]
    pushed = server.root / NAME
    assert "`zoo:llava-scenes`" in (pushed / "README.md").read_text()
    assert not (pushed / "state").exists()
    if kind == "medusa":
        assert Medusa.from_pretrained(NAME).heads.weight.shape[1] == 4
    elif kind == "eagle":
        assert registry.create("draft", f"eagle:path={NAME}").drafter.width == 160
    else:
        assert registry.create("draft", f"assistant:model={pushed}").length > 0


def test_the_command_refuses_before_it_trains(server, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    words = f"train drafter --model zoo:llava-scenes --out {tmp_path / 'out'} --push {NAME}"
    found = invoke(*words.split())
    assert isinstance(found.exception, (MMDecodeError, SystemExit)) and found.exit_code
    found = invoke(*words.split()[:-2], "--private")
    assert found.exit_code and "--push" in str(found.exception) + found.output
    assert not (tmp_path / "out").exists()
