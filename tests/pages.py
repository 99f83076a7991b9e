"""What every page of the library has to be: whole, well-formed, and named as its maker's."""

from html.parser import HTMLParser

from mmdecode.files import MAKER

VOID = {"meta", "link", "input", "br", "img", "hr", "wbr"}


class Checked(HTMLParser):
    """Refuses tags that do not close, and collects what a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.audio, self.ids = [], [], 0, set()
        self.generator = None

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.audio += tag == "audio"
        if attrs.get("name") == "generator":
            assert self.open == ["html", "head"]
            self.generator = attrs["content"]
        assert attrs.get("id") not in self.ids or attrs.get("id") is None
        self.ids.add(attrs.get("id"))
        self.fetched += [attrs[key] for key in ("src", "href") if key in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"{tag} closes {self.open[-3:]}"
        self.open.pop()


def checked(text):
    """A page, read to its end."""
    parser = Checked()
    parser.feed(text)
    parser.close()
    assert not parser.open
    assert parser.generator == MAKER
    return parser
