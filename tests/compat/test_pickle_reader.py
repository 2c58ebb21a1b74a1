"""Pickles of plain data are read as Python reads them; everything else in one is refused, and nothing of it runs."""

from __future__ import annotations

import builtins
import collections
import contextlib
import os
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.compat import pickle_reader
from windlass.compat.pickle_reader import read_pickle
from windlass.core.errors import CheckpointError

WITNESS = "WINDLASS_TEST_EXECUTED"
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=300)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-5, 300), inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


def read(data: bytes) -> Any:
    return read_pickle(data, "file.pt", {})


@given(TREES, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_comes_back(tree: Any, protocol: int) -> None:
    assert read(pickle.dumps(tree, protocol=protocol)) == tree


def test_shared_and_counted_values() -> None:
    shared = [1, 2]
    got = read(
        pickle.dumps({"a": shared, "b": (shared, shared), "c": collections.Counter("abca")}, protocol=2)
    )
    assert got == {"a": [1, 2], "b": ([1, 2], [1, 2]), "c": {"a": 2, "b": 1, "c": 1}}
    assert got["a"] is got["b"][0] is got["b"][1]


@pytest.mark.parametrize("protocol", [2, 4])
def test_numbers_of_numpy_become_plain_numbers(protocol: int) -> None:
    numbers = [np.float64(0.1), np.float32(2.5), np.int64(-3), np.bool_(True), np.float64(0.3)]
    got = read(pickle.dumps(numbers, protocol=protocol))
    assert got == [0.1, 2.5, -3, True, 0.3]
    assert [type(value) for value in got] == [float, float, int, bool, float]


# --- what is refused


class Calls:
    """Unpickled anywhere, it calls what it was given."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


class Plain:
    pass


ATTACKS: dict[str, tuple[bytes, str]] = {
    "function": (pickle.dumps(Calls(os.putenv, WITNESS, "1"), protocol=2), "putenv"),
    "function by text": (pickle.dumps(Calls(os.putenv, WITNESS, "1"), protocol=4), "putenv"),
    "getattr": (pickle.dumps(Calls(getattr, [], "append"), protocol=2), "getattr"),
    "evaluation": (pickle.dumps(Calls(builtins.eval, "1"), protocol=2), "eval"),
    "object": (pickle.dumps(Plain(), protocol=2), "Plain"),
    "class": (pickle.dumps(collections.deque, protocol=2), "deque"),
    "a class of the list alone": (pickle.dumps(collections.OrderedDict, protocol=2), "bare function or class"),
    "a method by a dotted name": (b"\x80\x04\x8c\x05torch\x8c\x0bTensor.data\x93.", "Tensor.data"),
    "INST": (b"(S'1'\nios\nsystem\n.", "opcode 0x53"),
    "INST alone": (b"(ios\nsystem\n.", "opcode INST"),
    "OBJ": (b"(ccollections\nOrderedDict\no.", "opcode OBJ"),
    "NEWOBJ": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "opcode NEWOBJ"),
    "EXT": (b"\x80\x02\x82\x01.", "opcode EXT1"),
    "a name that does not end": (b"c" + b"a" * 1000, "name does not end"),
    "attributes": (b"\x80\x02]}b.", "attributes of an object"),
    "a call of a value": (b"\x80\x02K\x01)R.", "not there"),
    "arguments that do not fit": (b"\x80\x02ctorch\nSize\nK\x01K\x02\x86R.", "other arguments"),
    "a foreign reference": (b"\x80\x02X\x01\x00\x00\x00xQ.", "not there"),
    "no storage": (
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ.",
        "does not hold",
    ),
    "nothing": (b"", "ends too early"),
    "two values": (b"\x80\x02NN.", "2 values"),
    "a mark": (b"\x80\x02(.", "bare function or class"),
    "an odd map": (b"\x80\x02}(Nu.", "without a value"),
    "no mark": (b"\x80\x02Nt.", "mark is missing"),
    "a missing memo": (b"\x80\x02h\x07.", "did not note"),
    "a key that is a tuple": (pickle.dumps({(1, 2): 3}, protocol=2), "key of a map is a tuple"),
    "a set": (pickle.dumps({1}, protocol=4), "opcode 0x8f"),
    "a new protocol": (b"\x80\x09N.", "protocol"),
    "an absurd number": (b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"0", "absurdly long"),
    "a negative length": (b"\x80\x02\x8b" + struct.pack("<i", -1) + b".", "absurdly long"),
    "a text that claims exabytes": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "ends too early"),
    "text that is none": (b"\x80\x02X\x01\x00\x00\x00\xff.", "UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_anything_else_is_refused_by_name(name: str) -> None:
    data, message = ATTACKS[name]
    with pytest.raises(CheckpointError, match=f"(?s)^file.pt is not read: .*{message}"):
        read(data)
    assert WITNESS not in os.environ


def nested_list(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def doubled_tuple(levels: int) -> bytes:
    """Makes a tuple of twice the tuple below, on every level: small in the file and in memory, endless to walk
    through.
    """
    return b"N" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(levels))


def endless_list() -> bytes:
    return b"\x80\x02]q\x00h\x00a."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (nested_list(1000), "nested more than"),
        (nested_list(100_000), "nested more than"),
        (b"\x80\x02" + doubled_tuple(60) + b".", "refer to each other too often"),
        (b"\x80\x02ctorch\ndevice\n" + doubled_tuple(60) + b"\x85R.", "device is malformed"),
        (b"\x80\x02cnumpy\ndtype\n" + doubled_tuple(60) + b"\x85R.", "not a plain number"),
        (endless_list(), "nested more than"),
    ],
)
def test_what_would_have_no_end_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(data)


def test_depth_up_to_the_bound_is_read() -> None:
    assert read(nested_list(pickle_reader.MAX_DEPTH)) is not None


def test_opcodes_and_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\x80\x02" + b"N0" * 1000 + b"N."
    assert read(data) is None
    monkeypatch.setattr(pickle_reader, "MAX_OPCODES", 2000)
    with pytest.raises(CheckpointError, match="more than 2,000 opcodes"):
        read(data)
    monkeypatch.setattr(pickle_reader, "MAX_BYTES", 100)
    with pytest.raises(CheckpointError, match="at most 100 are read"):
        read(data)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_one_kind_of_error(data: bytes) -> None:
    _value_or_error(lambda: read(data))


def test_any_damage_is_a_value_or_one_kind_of_error() -> None:
    whole = pickle.dumps(
        {"a": [1, 2.5, (None, "text", b"x" * 300)], "b": np.float64(1), "c": {"d": 1 << 80}}, 2
    )
    chance = random.Random(0)
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        _value_or_error(lambda data=data: read(bytes(data)))  # type: ignore[misc]


def _value_or_error(body: Callable[[], Any]) -> None:
    """Any other error than this one would end the test."""
    with contextlib.suppress(CheckpointError):
        body()


def test_objects_are_left_unread_where_a_reader_allows_them() -> None:
    """Neither their classes nor their functions are looked up, and values beside them are read."""
    content = {
        "plain": [1, 2],
        "object": Plain(),
        "called": Calls(os.putenv, WITNESS, "1"),
        "kind": collections.deque,
    }
    got = read_pickle(pickle.dumps(content, protocol=2), "file.pt", {}, objects=True)
    assert got["plain"] == [1, 2]
    assert {key: got[key].name.rpartition(".")[2] for key in ("object", "called", "kind")} == {
        "object": "Plain", "called": "putenv", "kind": "deque"
    }  # fmt: skip
    assert WITNESS not in os.environ
