"""Proxies of parts that have only the names that their base class declares."""

from dataclasses import replace

import mmdecode as mm


class Undeclared(Exception):
    """Somebody asked a part for what its base does not declare; no probe takes it for an answer."""


def declared(base):
    """Public names of a base, its annotations included."""
    own = [(*vars(cls), *vars(cls).get("__annotations__", ())) for cls in base.__mro__]
    names = {name for names in own for name in names}
    return {name for name in names if not name.startswith("_")}


def guarded(part, base, **changed):
    """A part of class ``base`` that hands every declared name on to ``part``.

    Args:
        part: It.
        base: What declares names.
        **changed: Values that replace the part's own.
    """
    known = declared(base)

    def get(self, name):
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        if name not in known:
            raise Undeclared(
                f"{type(part).__name__}.{name}, which {base.__name__} does not declare"
            )
        return changed[name] if name in changed else getattr(part, name)

    def put(self, name, value):
        if name not in known:
            raise Undeclared(f"{type(part).__name__}.{name} was set")
        setattr(part, name, value)

    # methods are looked for on the class too; `get` answers in their place
    inside = {name: getattr(type(part), name) for name in known if hasattr(type(part), name)}
    inside |= {"__getattribute__": get, "__setattr__": put, "__init__": lambda self: None}
    if callable(part):
        inside["__call__"] = lambda self, *given: part(*given)
    return type(type(part).__name__, (base,), inside)()


def drafter(part):
    """A drafter whose sessions are guarded too; one without sessions yet is left as it is."""
    if hasattr(part, "propose"):
        return part

    def begin(*given):
        return guarded(part.begin(*given), mm.DraftSession)

    return guarded(part, mm.Drafter, begin=begin)


def guide(part):
    """A guide whose own runners of branches are guarded too; ``None``: none."""
    if part is None:
        return None

    def built(build):
        return build and (lambda call: guarded(build(call), mm.BranchRunner))

    branches = [replace(spec, build=built(spec.build)) for spec in part.branches]
    return guarded(part, mm.Guide, branches=branches)


def rule(part):
    """A rule."""
    return guarded(part, mm.AcceptanceRule)


def adapter(part):
    """An adapter."""
    return guarded(part, mm.Adapter)
