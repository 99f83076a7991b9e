"""``mmdecode demo image``: the same seeds drawn in three ways, and the page about them."""

import functools
import re
from pathlib import Path

import pytest

from mmdecode.demo.images import command as demo_image
from mmdecode.image_ar import ImageGenerator
from mmdecode.runs.files import is_own
from tests.support.commands import invoke, json_of
from tests.support.pages import checked

run = functools.partial(invoke, "demo", "image", env={"COLUMNS": "120"})


@pytest.mark.slow
def test_demo_draws_the_same_images_in_fewer_passes_and_writes_a_page(tmp_path):
    done = run("--limit", 1, "--json", "--out", tmp_path / "demo", "--device", "cpu")
    assert done.exit_code == 0, done.output
    found = json_of(done)
    assert found["identical"] and found["pictures"] == ["house"]
    plain, exact, relaxed = (found["ways"][name] for name in ("ar", "exact", "relaxed"))
    assert plain["passes"] == [255] and plain["tokens_per_pass"] == 1
    assert exact["tokens_per_pass"] > 1.5 < relaxed["tokens_per_pass"]
    assert exact["bits_per_token"] == pytest.approx(plain["bits_per_token"], abs=1e-3)
    assert exact["law"] == "exact" and relaxed["law"] == "heuristic"
    shown = Path(found["files"]["report.html"])
    assert shown == tmp_path / "demo" / "report.html" and str(shown) in done.stderr
    assert is_own(shown), "a second demo needs no flag"
    parser = checked(shown.read_text())
    assert all(address.startswith("data:") for address in parser.fetched)
    assert "(heuristic distribution)" in " ".join(done.stderr.split())


def page_image(**changes):
    fields = {
        "png": b"png",
        "commits": [[0, 1, 1], [2, 2, -1]],
        "passes": 2,
        "tokens": 6,
        "seconds": 0.5,
        "bits": 3.0,
        "same": True,
    }
    return demo_image.PageImage(**fields | changes)


def report(*ways):
    given = ways or (("ar", "exact", page_image(passes=5)), ("exact", "exact", page_image()))
    made = [
        demo_image.Way(name=n, about="a <b>", guarantee=guarantee, images=[one])
        for n, guarantee, one in given
    ]
    return demo_image.Ways(model="zoo:m", names=["<ring>"], ways=made, conditions={"device": "cpu"})


def test_page_is_one_well_formed_file_that_fetches_nothing():
    text = demo_image.page(report())
    assert "exact distribution</span></span> <span>pictures come as often as" in text
    assert "heuristic distribution" not in text  # a legend of what is there
    assert "the darker, the later" in text and "a seam: another pass" in text
    parser = checked(text)
    assert all(address.startswith("data:") for address in parser.fetched)
    assert not re.search(r"https?://|@import|url\(|src=[\"'](?!data:)", text)
    assert "<ring>" not in text and "<b>1/2.5</b> of the passes" in text
    other = report(("ar", "exact", page_image()), ("relaxed", "heuristic", page_image(same=False)))
    text = demo_image.page(other)
    assert "Picture, drawn in 2 ways" in text and "another picture" in text
    assert '<span class="tag bad">heuristic distribution</span>' in text


def test_seams_part_codes_of_different_passes_and_no_others():
    text = demo_image.page(report(("ar", "exact", page_image())))
    assert re.findall(r'class="seam" d="([^"]*)"', text)[1:] == [  # after the legend
        "M1 0v1M0 1h1M1 1h1M2 1v1M2 1h1"
    ]
    lights = re.findall(r"--light:(\d+)%", text)
    assert lights[:4] == ["90", "55", "55", "20"]
    assert "with the prompt" in text and "row 1, column 2: pass 1" in text and "given" in text


def test_numbers_compare_with_plain_decoding():
    plain, other = demo_image.numbers(
        report(("ar", "exact", page_image(passes=5, seconds=1.0)), ("x", "y", page_image()))
    )
    assert (plain["way"], other["way"]) == ("ar", "x")
    assert plain["tokens per pass"] == "1.00" and other["tokens per pass"] == "2.50"
    assert other["times plain"] == "2.00" and other["pictures as plain"] == "1 of 1"


def test_classes_of_the_demo_are_spread_over_all_classes():
    generator = object.__new__(ImageGenerator)
    generator.classes = 30
    assert demo_image._wanted(generator, 4) == [0, 7, 15, 22]
    generator.classes = 0
    assert demo_image._wanted(generator, 2) == ["a red ring", "a blue star"]
