"""``mmdecode audit``: verdicts, tables, JSON and exit codes."""

import functools
import json

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from mmdecode import checkpoints
from mmdecode.errors import InputError, OptionError
from tests.support import tiny_models
from tests.support.commands import invoke, json_of

run = functools.partial(invoke, "audit", catch_exceptions=False)


def test_a_draft_for_the_shipped_model_passes():
    done = run("--draft", "medusa", "--limit", 1, "--dtype", "bf16", "--json")
    found = json_of(done)
    assert done.exit_code == 0, found["words"]
    assert found["verdict"] == "passes"
    assert (found["draft"], found["dtype"], len(found["judged"])) == ("Medusa", "bfloat16", 1)
    assert found["tokens"] == found["judged"][0]["tokens"] > 5
    assert found["failures"] == []


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    """A tiny random Llama with the shipped tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoints.ZOO / "whisper-synth"))
    tiny_models.llama(
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "prompts.txt").write_text("one two three one two\n\nfour five\n")
    return folder


def test_a_text_model_is_audited_line_by_line_and_its_tokens_are_judged(text_model, tmp_path):
    prompts = text_model / "prompts.txt"
    given = ["--model", text_model, "--data", prompts, "--device", "cpu", "--max-new-tokens", 8]
    done = run(*given, "--draft", "lookup")
    assert done.exit_code == 0
    assert "passes: token for token the same as plain generate" in done.stdout
    assert "line 2" in done.stdout

    rows = [*greedy_rows(text_model, 8)]
    rows[1][5] = (rows[1][5] + 1) % 1000
    (tmp_path / "tokens.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run(*given, "--tokens", tmp_path / "tokens.jsonl")
    assert done.exit_code == 1
    assert "fails: 1 of 2 sequences" in done.stdout
    assert "line 2 at position 5 has token" in done.stdout
    assert "FAULT" in done.stdout.replace("\n", "")


def test_an_encoder_decoder_of_text_is_audited(text_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(str(text_model))
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    given = ["--model", tmp_path, "--data", text_model / "prompts.txt", "--device", "cpu"]
    found = json_of(run(*given, "--draft", "lookup", "--max-new-tokens", 6, "--json"))
    assert (found["verdict"], found["model"]) == ("passes", "T5ForConditionalGeneration")
    assert len(found["judged"]) == 2


def greedy_rows(folder, length):
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = LlamaForCausalLM.from_pretrained(folder)
    for line in ("one two three one two", "four five"):
        ids = tokenizer(line, return_tensors="pt").input_ids
        found = model.generate(ids, do_sample=False, max_new_tokens=length, pad_token_id=0)
        yield found[0, ids.shape[1] :].tolist()


def test_rows_of_a_server_are_judged_beyond_our_own_limit(text_model, tmp_path):
    rows = [*greedy_rows(text_model, 70)]
    (tmp_path / "tokens.json").write_text(json.dumps(rows))
    given = ["--model", text_model, "--data", text_model / "prompts.txt", "--device", "cpu"]
    given += ["--tokens", tmp_path / "tokens.json"]
    done = run(*given)
    assert done.exit_code == 1
    assert "inconclusive: 2 of 2 sequences end where the model goes on" in done.stdout
    assert "cut at 70" in done.stdout
    done = run(*given, "--max-new-tokens", 70)
    assert done.exit_code == 0
    assert "passes: token for token the same" in done.stdout


def test_samples_are_of_the_whole_distribution_whatever_the_checkpoint_says(text_model, tmp_path):
    folder = tmp_path / "model"
    AutoTokenizer.from_pretrained(str(text_model)).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(text_model)
    model.generation_config.update(do_sample=True, top_p=0.001, min_p=0.9, typical_p=0.1)
    model.save_pretrained(folder)
    (tmp_path / "tokens.json").write_text(json.dumps([*greedy_rows(text_model, 60)]))
    given = ["--model", folder, "--data", text_model / "prompts.txt", "--device", "cpu"]
    done = run(*given, "--tokens", tmp_path / "tokens.json", "--sample")
    assert done.exit_code == 1
    assert "fails: the tokens were not drawn from the model's distribution" in done.stdout


def test_a_recording_that_cannot_be_read_is_listed_and_the_others_are_audited(tmp_path):
    clip = checkpoints.ZOO.parent / "data" / "speech-test" / "clip_05.ogg"
    (tmp_path / "a.ogg").write_bytes(clip.read_bytes())
    (tmp_path / "b.ogg").write_bytes(b"no audio")
    done = run("--data", tmp_path, "--no-timestamps", "--json", "--max-new-tokens", 6)
    found = json_of(done)
    assert done.exit_code == 1
    assert found["verdict"] == "passes"
    assert [failure["source"] for failure in found["failures"]] == [str(tmp_path / "b.ogg")]
    assert found["tokens"] <= 6


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(OptionError, match="needs --sample"):
        run("--temperature", 0.5)
    with pytest.raises(OptionError, match="leave out --draft"):
        run("--tokens", tmp_path / "x", "--draft", "medusa")
    with pytest.raises(InputError, match="cannot be loaded"):
        run("--model", tmp_path)
