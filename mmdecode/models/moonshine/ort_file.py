"""Reads weights and nodes of a model in onnxruntime's own format (``.ort``), without running it.

The format is a flatbuffer. A table begins with the distance to its vtable, which lists for each
field of the schema the offset from the start of the table, or zero if the field is absent. Strings,
vectors and inner tables are referenced by offsets relative to the offset's own position. An offset
that points outside the file raises `InputError`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmdecode.errors import InputError

MARK = b"ORTM"
"""Bytes 4 to 8 of every ``.ort`` file."""

# field numbers of the schema
SESSION_MODEL, MODEL_GRAPH = 1, 7
GRAPH_TENSORS, GRAPH_NODES = 0, 2
NODE_NAME, NODE_KIND, NODE_INPUTS, NODE_ATTRIBUTES = 0, 5, 8, 10
ATTRIBUTE_GRAPH = 7
TENSOR_NAME, TENSOR_SHAPE, TENSOR_DTYPE, TENSOR_DATA = 0, 2, 3, 4

DTYPES = {1: "<f4", 2: "u1", 3: "i1", 6: "<i4", 7: "<i8", 10: "<f2", 11: "<f8"}
"""NumPy's dtypes by their numbers in the schema; tensors of other types are not read."""

MOST_NESTED = 8
"""Maximum depth of nested graphs; the published models have two levels."""


@dataclass(frozen=True)
class Node:
    """An operation of a graph.

    Attributes:
        name: For example ``/layers.0/self_attn/q_proj/MatMul_quant``.
        kind: Kind of the operation, for example ``DynamicQuantizeMatMul``.
        inputs: Names of its inputs, without those that are left empty.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Weights and operations of a file, nested graphs included.

    Attributes:
        tensors: Stored arrays by name, read-only views of the file.
        nodes: Operations; a nested graph's operations follow the operation that contains it.
    """

    tensors: dict[str, np.ndarray]
    nodes: list[Node]


def read_graph(file: Path) -> Graph:
    """Reads the tensors and operations of a file.

    Raises:
        InputError: The file cannot be read, has another format, or is damaged.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; check the path") from error
    return graph_of(data, str(file))


def graph_of(data: bytes, file: str) -> Graph:
    """Parses the tensors and operations in the content of a file.

    Args:
        data: Content of the file.
        file: Name of the file, for errors.

    Raises:
        InputError: The content has another format or is damaged.
    """
    if data[4:8] != MARK:
        raise InputError(
            f"{file} is no model in onnxruntime's format: bytes 4 to 8 are {data[4:8]!r}, expected "
            f"{MARK!r}; give an .ort file"
        )
    try:
        model = _Table(data, _offset(data, 0)).table(SESSION_MODEL)
        graph = model and model.table(MODEL_GRAPH)
        if graph is None:
            raise _DamagedError("it holds no graph")
        return Graph(*_read(graph, 0))
    except _DamagedError as error:
        raise InputError(f"{file} is damaged: {error}; get the file again") from error


def _read(graph: _Table, depth: int) -> tuple[dict[str, np.ndarray], list[Node]]:
    """Returns the tensors and operations of a graph and of the graphs nested in it."""
    if depth == MOST_NESTED:
        raise _DamagedError(f"graphs are nested more than {MOST_NESTED} deep")
    tensors, nodes = {}, []
    for tensor in graph.tables(GRAPH_TENSORS):
        array = _array(tensor)
        if array is not None:
            tensors[tensor.text(TENSOR_NAME)] = array
    for node in graph.tables(GRAPH_NODES):
        inputs = tuple(node.texts(NODE_INPUTS))
        nodes.append(Node(node.text(NODE_NAME), node.text(NODE_KIND), inputs))
        for attribute in node.tables(NODE_ATTRIBUTES):
            branch = attribute.table(ATTRIBUTE_GRAPH)
            if branch is not None:
                inner, more = _read(branch, depth + 1)
                tensors = inner | tensors
                nodes += more
    return tensors, nodes


def _array(tensor: _Table) -> np.ndarray | None:
    dtype = DTYPES.get(tensor.number(TENSOR_DTYPE, "<i"))
    shape = tensor.vector(TENSOR_SHAPE, "<i8")
    raw = tensor.vector(TENSOR_DATA, "u1")
    if dtype is None:
        return None
    size = math.prod(map(int, shape)) * np.dtype(dtype).itemsize
    if (shape < 0).any() or size != len(raw):
        raise _DamagedError(f"{len(raw)} bytes for a {dtype} tensor of shape {shape.tolist()}")
    return raw.view(dtype).reshape(shape) if size else np.zeros(0, dtype)


class _DamagedError(Exception):
    """An offset points outside the file, or the file is inconsistent."""


def _unpack(data: bytes, kind: str, position: int) -> int:
    """Reads a number at a position, in bytes from the start of the file.

    Raises:
        _DamagedError: The position is outside the file.
    """
    if not 0 <= position <= len(data) - struct.calcsize(kind):
        raise _DamagedError(f"it refers to byte {position} of {len(data)}")
    return struct.unpack_from(kind, data, position)[0]


def _offset(data: bytes, position: int) -> int:
    """Returns the position that the offset stored at ``position`` refers to."""
    return position + _unpack(data, "<I", position)


@dataclass(frozen=True)
class _Table:
    """A table of the flatbuffer, at a position of the file."""

    data: bytes
    position: int

    def _field(self, number: int) -> int | None:
        """Returns the position of a field; ``None``: the field is absent."""
        vtable = self.position - _unpack(self.data, "<i", self.position)
        entry = 4 + 2 * number
        if entry >= _unpack(self.data, "<H", vtable):
            return None
        distance = _unpack(self.data, "<H", vtable + entry)
        return self.position + distance if distance else None

    def number(self, field: int, kind: str) -> int:
        position = self._field(field)
        return 0 if position is None else _unpack(self.data, kind, position)

    def table(self, field: int) -> _Table | None:
        position = self._field(field)
        return None if position is None else _Table(self.data, _offset(self.data, position))

    def vector(self, field: int, dtype: str) -> np.ndarray:
        """Returns a read-only view of a vector of numbers; empty if the field is absent."""
        position = self._field(field)
        if position is None:
            return np.zeros(0, dtype)
        begin = _offset(self.data, position)
        count = _unpack(self.data, "<I", begin)
        if count * np.dtype(dtype).itemsize > len(self.data) - begin - 4:
            raise _DamagedError(f"a vector of {count} at byte {begin} of {len(self.data)}")
        return np.frombuffer(self.data, dtype, count, begin + 4)

    def _inner(self, field: int) -> Iterator[int]:
        """Returns the positions that a vector of offsets refers to."""
        position = self._field(field)
        if position is not None:
            begin = _offset(self.data, position) + 4
            offsets = self.vector(field, "<u4")
            yield from (begin + 4 * i + int(offset) for i, offset in enumerate(offsets))

    def tables(self, field: int) -> Iterator[_Table]:
        return (_Table(self.data, position) for position in self._inner(field))

    def texts(self, field: int) -> Iterator[str]:
        return (_text(self.data, position) for position in self._inner(field))

    def text(self, field: int) -> str:
        position = self._field(field)
        return "" if position is None else _text(self.data, _offset(self.data, position))


def _text(data: bytes, position: int) -> str:
    count = _unpack(data, "<I", position)
    if count > len(data) - position - 4:
        raise _DamagedError(f"a name of {count} bytes at byte {position} of {len(data)}")
    try:
        return data[position + 4 : position + 4 + count].decode()
    except UnicodeDecodeError as error:
        raise _DamagedError(f"a name at byte {position} is no UTF-8") from error
