"""Words that no reader outside this project knows stay out of code, help and documents."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COINED = {
    *("law", "laws", "likeliest", "learnt", "anew"),
    *("Law", "LawView", "OwnLaw", "log_law", "draft_law", "target_law"),
    *("Settled", "ModelBranches", "Scorer", "Painter", "draft_free", "own_tokens_only"),
    *("tail_tokens", "tail_law", "law_rows", "prompt_law", "RowLaw"),
    *("painter", "painters", "membership_rule", "frontdoor"),
}
"""Identifiers and words that house style replaced by those of the field."""

NAMES = {
    *("place", "places", "behind", "beside", "drawn", "said", "heard", "told", "advice"),
    *("painter", "painters", "picture", "pictures", "letters", "cuts", "looped", "made_up"),
    *("doubt", "doubts", "doubtful", "sure", "sureness", "sees"),
}
"""Words that are English in a sentence, and that no identifier is made of."""

KEPT_NAMES = {
    # options of methods, as strings of published results name them
    ("adaptvis.py", "sure"),
    ("whisper_cd.py", "doubt"),
    # fields that are keys of results on disk
    ("results.py", "looped"),
    ("segments.py", "looped"),
    ("transcriber.py", "looped"),
    ("test_repetition.py", "looped"),
}
"""Identifiers that are made of such a word all the same, by file."""

KEPT = {
    # keys of results and files on disk
    ('"law"', "generate_image.py"),
    ('"law"', "jobs.py"),
    ('"law"', "page.py"),
    ('"law"', "command.py"),
    ('"learnt"', "trainer.py"),
    ("'learnt'", "hub.py"),
    # what models are asked, and what they answer
    ("likeliest", "prompts.py"),
    ("likeliest", "guard.py"),
    ("`law` is", "generate_image.md"),
    ("bug: stale law", "image_speed.md"),
    ("2 x 2 likeliest", "drafters.md"),
}
"""Parts of lines, by file, that hold a word all the same."""

PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").iterdir()),
]


def coinages(text):
    """Coined words of a text, each as a whole word."""
    return [word for word in re.findall(r"\w+", text) if word in COINED]


def found_in(file):
    """Lines of a module with coined words: names, comments and strings."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if tokenize.tok_name[token.type] not in ("NAME", "COMMENT", "STRING", "FSTRING_MIDDLE"):
            continue
        kept = any(part in token.line and name == file.name for part, name in KEPT)
        if coinages(token.string) and not kept:
            found.append(f"{file.relative_to(ROOT)}:{token.start[0]}: {coinages(token.string)}")
    return found


DANGLING = re.compile(r"(Of|By|As|What|That|Whose|Which|Behind|Beside|Under|Who|Those|Such|Ones)\b")
"""First words of sentences that do not name their subject."""


def dangling(file):
    """Sentences and entries of a module's docstrings that begin with such a word."""
    tree = ast.parse(file.read_text())
    found = []
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
                continue
            for part in re.split(r"(?<=[.])\s+|\n\s*\n|\n(?=\s+[\w*]+: )", value.value):
                text = re.sub(r"^\s*[\w*]+: ", "", part).strip()
                if DANGLING.match(text):
                    found.append(f"{file.name}:{child.lineno}: {' '.join(text.split())[:60]}")
    return found


def test_sentences_of_docstrings_begin_with_what_they_are_about():
    files = sorted((ROOT / "mmdecode").rglob("*.py"))
    assert [line for file in files for line in dangling(file)] == []


def test_a_dangling_sentence_is_found_where_it_stands(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""Heads. What they read.\n\nBy default none."""\n\n\n'
        'def f(a):\n    """Sum.\n\n    Args:\n        a: Of each.\n    """\n'
    )
    assert [line.split(": ")[1] for line in dangling(file)] == [
        "What they read.",
        "By default none.",
        "Of each.",
    ]


@pytest.mark.parametrize("room", sorted(p.name for p in (ROOT / "mmdecode").iterdir()))
def test_modules_speak_the_words_of_the_field(room):
    path = ROOT / "mmdecode" / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.suffix == ".py" else []
    assert [line for file in files for line in found_in(file)] == []


NAMED = ("id", "attr", "arg", "name", "asname", "module")
"""Fields of syntax nodes that hold identifiers."""


def named_in(file):
    """Lines of a module with identifiers that are made of a word of `NAMES`, also in f-strings."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        names = [getattr(node, field, None) for field in NAMED]
        for name in {name for name in names if isinstance(name, str)}:
            parts = f"_{name}_".lower()
            kept = (file.name, name) in KEPT_NAMES
            if not kept and any(f"_{word}_" in parts for word in NAMES):
                found.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}")
    return found


CODE = ("mmdecode", "tests", "benchmarks", "examples", "asr", "vlm", "image_ar")


@pytest.mark.parametrize("folder", CODE)
def test_identifiers_are_made_of_words_of_the_field(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert [line for file in files for line in named_in(file)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_speak_the_words_of_the_field(page):
    lines = page.read_text().splitlines()
    kept = [part for part, name in KEPT if name == page.name]
    assert [line for line in lines if coinages(line) and not any(k in line for k in kept)] == []


def test_a_coined_word_is_found_where_it_stands(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "a.py"
    file.write_text('"""The law of a token."""\n\nlikeliest = 1  # learnt\nlawn = "lawful"\n')
    assert found_in(file) == ["a.py:1: ['law']", "a.py:3: ['likeliest']", "a.py:3: ['learnt']"]
