"""The reader of onnxruntime's files: what it finds, and that no damaged file ends it otherwise."""

import struct

import numpy as np
import pytest

from mmdecode.errors import InputError
from mmdecode.models.moonshine.ort_file import MARK, Node, graph_of, read_graph


class Writer:
    """A flatbuffer of tables: dicts of fields by number, each an int, text, array, dict or list."""

    def __init__(self, root):
        self.data = bytearray(b"\0\0\0\0" + MARK)
        struct.pack_into("<I", self.data, 0, self.table(root))

    def table(self, fields):
        vtable, count = len(self.data), max(fields) + 1
        slots = [4 + 4 * list(fields).index(n) if n in fields else 0 for n in range(count)]
        sizes = (4 + 2 * count, 4 + 4 * len(fields))
        self.data += struct.pack(f"<{2 + count}H", *sizes, *slots)
        position = len(self.data)
        self.data += struct.pack("<i", position - vtable) + bytes(4 * len(fields))
        for at, value in zip(range(position + 4, len(self.data), 4), fields.values(), strict=True):
            self.field(at, value)
        return position

    def field(self, at, value):
        if isinstance(value, int):
            struct.pack_into("<i", self.data, at, value)
            return
        if isinstance(value, dict):
            position = self.table(value)
        else:
            position = len(self.data)
            self.data += struct.pack("<I", len(value))
            if isinstance(value, list):
                self.data += bytes(4 * len(value))
                for number, one in enumerate(value):
                    self.field(position + 4 + 4 * number, one)
            else:
                self.data += value.encode() if isinstance(value, str) else value.tobytes()
        struct.pack_into("<I", self.data, at, position - at)


def tensor(name, array, kind):
    raw = np.frombuffer(array.tobytes(), "u1")
    return {0: name, 2: np.array(array.shape, "<i8"), 3: kind, 4: raw}


SCALE, WEIGHT = np.float32(0.5), np.arange(6, dtype="u1").reshape(2, 3)
BRANCH = {0: [tensor("inner", np.array([7], "<i8"), 7)], 2: [{0: "/in", 5: "Add", 8: ["x", ""]}]}
GRAPH = {
    0: [tensor("weight", WEIGHT, 2), tensor("scale", SCALE, 1), tensor("odd", WEIGHT, 16)],
    2: [{0: "", 5: "If", 8: ["cond"], 10: [{0: "then_branch", 2: 5, 7: BRANCH}]}],
}
FILE = bytes(Writer({1: {7: GRAPH}}).data)


def read(data):
    return graph_of(data, "model.ort")


def test_tensors_and_nodes_are_found_in_branches_too():
    graph = read(FILE)
    assert graph.nodes == [Node("", "If", ("cond",)), Node("/in", "Add", ("x", ""))]
    assert list(graph.tensors) == ["inner", "weight", "scale"]
    assert graph.tensors["weight"].tolist() == WEIGHT.tolist()
    assert graph.tensors["scale"].shape == ()
    assert graph.tensors["scale"] == np.float32(0.5)
    assert graph.tensors["inner"].dtype == np.int64


def test_a_file_cut_off_anywhere_is_refused():
    for size in range(len(FILE)):
        with pytest.raises(InputError, match=r"model\.ort is (damaged|no model)"):
            read(FILE[:size])


def test_a_byte_that_changed_gives_a_graph_or_a_refusal():
    refused = 0
    for position in range(len(FILE)):
        for value in (0x00, 0x7F, 0x80, 0xFF):
            damaged = bytearray(FILE)
            damaged[position] = value
            try:
                read(bytes(damaged))
            except InputError:
                refused += 1
    assert refused > len(FILE) // 2


def test_graphs_without_end_inside_of_each_other_are_refused():
    graph = {0: []}
    for _ in range(9):
        graph = {2: [{5: "If", 10: [{7: graph}]}]}
    with pytest.raises(InputError, match="graphs are nested more than 8 deep"):
        read(bytes(Writer({1: {7: graph}}).data))


@pytest.mark.parametrize("data", [b"", b"PK\3\4 a zip", b"\x08\x07\x12\x04onnx"])
def test_a_file_of_another_format_is_named(data):
    with pytest.raises(InputError, match="no model in onnxruntime's format"):
        read(data)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.ort cannot be read"):
        read_graph(tmp_path / "gone.ort")
