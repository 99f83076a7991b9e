"""Tables of one JSON object a line, and what a folder holds."""

import json


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def contents(folder):
    """All files but hidden ones, by their path in the folder.

    The units of work are left out of ``run.json``: inputs that were added later are new units.
    """
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name[0] != ".":
            found[str(path.relative_to(folder))] = path.read_bytes()
    if "run.json" in found:
        run = json.loads(found["run.json"])
        found["run.json"] = json.dumps({n: v for n, v in run.items() if n != "work"}).encode()
    return found
