"""Notebooks: executed, compared with the outputs they are committed with, and written again.

    python -m tests.support.notebooks [NAME ...]     # what `make notebooks` does
    python -m tests.support.notebooks --pages FOLDER # pages of the site, from committed outputs

The text of a cell tagged ``varies`` is not compared: it prints times or what else differs by run.
"""

import base64
import re
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
VARIES = "varies"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def execute(notebook, folder):
    """Runs a notebook in a kernel of its own; an error in a cell is raised here."""
    client = NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()


def texts(cell):
    """What a code cell printed and returned as text; pictures count by their kind alone.

    What goes to stderr are warnings and progress bars of the machine at hand.
    """
    found = []
    for output in cell.outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            if found and found[-1][0] == "printed":
                found[-1] = ("printed", found[-1][1] + output.text)
            else:
                found.append(("printed", output.text))
            continue
        data = output.get("data", {})
        kinds = [kind for kind in data if not kind.startswith("text/")]
        found.append((", ".join(kinds) or "text", _ADDRESS.sub("", data.get("text/plain", ""))))
        if "text/html" in data:
            found.append(("html", data["text/html"]))
    return found


def differences(committed, executed):
    """Cells whose texts are not those committed, each as a line that says where.

    Raises:
        AssertionError: The notebooks are not of the same cells.
    """
    assert [cell.source for cell in committed.cells] == [cell.source for cell in executed.cells]
    found = []
    for index, (before, after) in enumerate(zip(committed.cells, executed.cells, strict=True)):
        if before.cell_type != "code":
            continue
        was, is_now = texts(before), texts(after)
        if VARIES in before.metadata.get("tags", ()):
            was, is_now = [kind for kind, _ in was], [kind for kind, _ in is_now]
        for one, other in zip_longest(was, is_now):
            if one != other:
                found.append(f"cell {index}: {one!r} became {other!r}")
    return found


def tidied(notebook):
    """The notebook without what differs between runs and machines."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            output.pop("execution_count", None)
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count
            if "text/plain" in output.get("data", {}):
                output.data["text/plain"] = _ADDRESS.sub("", output.data["text/plain"])
    return notebook


def rewrite(path):
    """Executes a notebook and writes it with its outputs; one that says the same is left alone."""
    committed, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, folder)
    ran = any(cell.get("execution_count") for cell in committed.cells)
    if ran and not differences(committed, notebook):
        return False
    nbformat.write(tidied(notebook), path)
    return True


def page(path, folder):
    """Writes a notebook as a page of the site, and its pictures as files next to it."""
    parts = []
    for index, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for number, output in enumerate(cell.outputs):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{index}_{number}.png"
                (folder / name).write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![output of the cell above]({name})")
            elif "text/html" in data:
                # a blank line would end the block in which markdown leaves it alone
                html = re.sub(r"\n\s*\n", "\n", data["text/html"].strip())
                parts.append(f'<div class="output" markdown="0">{html}</div>')
            else:
                text = output.get("text", data.get("text/plain", "")).rstrip()
                parts.append(f"```text\n{text}\n```")
    (folder / f"{path.stem}.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    names = sys.argv[1:]
    if names[:1] == ["--pages"]:
        Path(names[1]).mkdir(parents=True, exist_ok=True)
        for path in sorted(FOLDER.glob("*.ipynb")):
            page(path, Path(names[1]))
        index = (FOLDER / "README.md").read_text(encoding="utf-8")
        (Path(names[1]) / "index.md").write_text(index.replace(".ipynb)", ".md)"))
        sys.exit()
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            print(f"{path.name}: {'written' if rewrite(path) else 'as it was'}")
