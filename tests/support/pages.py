"""Checks of every HTML page of the library: complete, well-formed, in order, marked as ours."""

import re
from html.parser import HTMLParser

from mmdecode.runs.files import MAKER

VOID = {"meta", "link", "input", "br", "img", "hr", "wbr"}
HEADINGS = {f"h{level}" for level in range(1, 7)}


class Checked(HTMLParser):
    """Refuses tags that do not close, and collects what a browser would fetch and a reader meets.

    Attributes:
        fetched: Addresses.
        headings: Levels, in order.
        unnamed: Players, pictures, groups and tab stops that do not say what they are.
        unscoped: Headers of tables that do not say whether they head a row or a column.
        wide: Widths in pixels that are fixed and wider than half a narrow screen.
        groups: For each group of words, the tabindex of each of its elements.
        stops: Tab stops that a page makes outside of such groups.
    """

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.audio, self.ids = [], [], 0, set()
        self.headings, self.unnamed, self.groups, self.stops = [], [], [], []
        self.unscoped, self.wide = [], []
        self.generator, self.language, self.inside = None, None, []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.audio += tag == "audio"
        if attrs.get("name") == "generator":
            assert self.open == ["html", "head"]
            self.generator = attrs["content"]
        assert attrs.get("id") not in self.ids or attrs.get("id") is None
        self.ids.add(attrs.get("id"))
        self.fetched += [attrs[key] for key in ("src", "href") if key in attrs]
        if tag in HEADINGS:
            self.headings.append(int(tag[1]))
        named = attrs.get("aria-label") or attrs.get("alt")
        stops = tag in ("button", "a", "audio") or "tabindex" in attrs
        shown = tag in ("audio", "img") or attrs.get("role") in ("img", "group", "note")
        if not named and (shown or "tabindex" in attrs):
            self.unnamed.append(tag)
        if tag == "html":
            self.language = attrs.get("lang")
        if tag == "th" and attrs.get("scope") not in ("row", "col"):
            self.unscoped.append(attrs)
        self.wide += re.findall(r"(?<!max-)width: *[\d.]{3,}px", attrs.get("style") or "")
        if "data-rove" in attrs:
            self.groups.append([])
            self.inside.append((len(self.open), self.groups[-1]))
        elif stops:
            tabindex = attrs.get("tabindex", "0")
            if self.inside:
                self.inside[-1][1].append(tabindex)
            else:
                self.stops.append((tag, tabindex))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"{tag} closes {self.open[-3:]}"
        self.open.pop()
        if self.inside and self.inside[-1][0] == len(self.open):
            self.inside.pop()


def checked(text):
    """A page, read to its end."""
    parser = Checked()
    parser.feed(text)
    parser.close()
    assert not parser.open
    assert parser.generator == MAKER
    assert parser.headings[0] == 1 and parser.headings.count(1) == 1
    steps = zip(parser.headings, parser.headings[1:], strict=False)
    assert all(after <= before + 1 for before, after in steps), parser.headings
    assert parser.unnamed == parser.unscoped == parser.wide == []
    assert parser.language == "en"
    for tabindices in parser.groups:
        assert sorted(tabindices) == sorted(
            ["0"] * bool(tabindices) + ["-1"] * (len(tabindices) - 1)
        )
    assert {tag for tag, _ in parser.stops} <= {"audio", "div"}
    return parser
