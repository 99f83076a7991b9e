"""Tables of one JSON object a line, and what a folder holds."""

import json


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def contents(folder):
    """All files but hidden ones, by their path in the folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
