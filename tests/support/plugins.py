"""Distributions of others with plug-ins, laid out as an installer leaves them."""


def install(folder, name, entry_points, **modules):
    """Puts a distribution and its modules into a folder; the path is the caller's to extend.

    Args:
        folder: Where.
        name: Of the distribution.
        entry_points: Lines ``name = module:Class`` by group.
        **modules: Code by the name of its module.
    """
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = [f"[{group}]\n{lines}\n" for group, lines in entry_points.items()]
    (info / "entry_points.txt").write_text("".join(groups))
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)
