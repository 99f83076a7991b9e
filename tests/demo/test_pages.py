"""Pages of the demos for all readers: first screen, keyboard, dark mode, narrow screens."""

import re

import pytest

from mmdecode.demo.images import command as demo_image
from mmdecode.demo.speech import clips_page
from mmdecode.demo.vision import page as answers_page
from mmdecode.evaluation.report.templates import ASSETS
from tests.demo import test_images, test_recordings, test_speech, test_vision
from tests.support.pages import checked

STYLES = {file.name: file.read_text() for file in sorted(ASSETS.glob("*.css"))}
PAGES = {
    "speech": lambda: clips_page.page(test_speech.report()),
    "people": lambda: clips_page.page(test_speech.report(), test_recordings.recordings()),
    "vlm": lambda: answers_page.page(
        test_vision.report(test_vision.given(drafted=test_vision.drafted()))
    ),
    "image": lambda: demo_image.page(test_images.report()),
}
TEXT = ("ink", "soft", "blue", "orange", "green", "pink", "good", "bad")


def rules(style):
    """Selectors and declarations, also of those inside of media queries."""
    return re.findall(r"([^{}]+)\{([^{}]*)\}", style)


def colours(dark):
    """Colours by name."""
    bodies = [body for selector, body in rules(STYLES["report.css"]) if ":root" in selector]
    return dict(re.findall(r"--([\w-]+):(#\w+)", bodies[dark]))


def brightness(colour):
    """Relative luminance, as WCAG 2 defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("name", PAGES)
def test_the_first_screen_is_a_sentence_and_a_figure(name):
    text = PAGES[name]()
    checked(text)
    assert re.search(r'</h1>\s*<figure class="glance"><figcaption>.+?</figcaption>', text)
    figure = text[text.index('<figure class="glance"') : text.index('<p class="lead"')]
    if name == "people":
        assert figure.count("<i ") == 2 and "somebody, 11.0 s, heard by moonshine:m" in figure
    else:
        assert figure.count('class="steps"') == 2 and "as wide as the tokens" in figure


def test_a_box_of_the_figure_is_a_pass_as_wide_as_its_tokens():
    text = PAGES["speech"]()
    plain, drafted = re.findall(r'<div class="steps" aria-hidden="true">(.*?)</div>', text)
    assert re.findall(r"flex:(\d+)", plain) == ["1"] * 3
    assert re.findall(r"flex:(\d+)", drafted) == ["3"]  # the prompt's pass is left out
    assert "token by token: <b>3</b> passes" in text
    assert "with zoo:m-medusa: <b>1</b> passes" in text
    text = PAGES["image"]()
    drafted = re.findall(r'<div class="steps" aria-hidden="true">(.*?)</div>', text)[1]
    assert re.findall(r"flex:(\d+)", drafted) == ["2", "2"]


@pytest.mark.parametrize("name", STYLES)
def test_what_reacts_to_the_pointer_reacts_to_the_keyboard(name):
    for selectors, _ in rules(STYLES[name]):
        alone = [one.strip() for one in selectors.split(",")]
        for selector in alone:
            assert selector.replace(":hover", ":focus-visible") in alone, selector


@pytest.mark.parametrize("name", PAGES)
def test_every_tip_can_be_reached_by_the_keyboard(name):
    text = PAGES[name]()
    assert not re.search(r"<rect[^>]*><title|\stitle=", text), "tips that only a pointer finds"
    for cell in re.findall(r'<(?:rect class="(?:cell|look)"|span class="pass")[^>]*>', text):
        assert re.search(r'tabindex="(0|-1)" aria-label="[^"]+"', cell)


@pytest.mark.parametrize("name", STYLES)
def test_no_width_is_fixed_beyond_a_narrow_screen(name):
    for selectors, body in rules(STYLES[name]):
        widths = re.findall(r"(?<![-\w])(?:min-)?width:([\d.]+)(px|rem|em)", body)
        for number, unit in widths:
            assert float(number) * (1 if unit == "px" else 16) < 280, (selectors, body)


def test_colours_can_be_read_in_the_light_and_in_the_dark():
    light, dark = colours(dark=False), colours(dark=True)
    assert light.keys() == dark.keys() >= {*TEXT}
    pairs = [(name, ground) for name in TEXT for ground in ("bg", "card")]
    pairs += [("ink", "blue-bg"), ("orange", "orange-bg"), ("green", "green-bg"), ("soft", "box")]
    for found in (light, dark):
        for name, ground in pairs:
            ends = sorted((brightness(found[name]), brightness(found[ground])))
            assert (ends[1] + 0.05) / (ends[0] + 0.05) >= 4.5, (name, ground)
