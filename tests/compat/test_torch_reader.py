"""Plain data in files of `torch.save` is read; everything else is refused in bounded memory and time, and never run."""

from __future__ import annotations

import builtins
import codecs
import collections
import contextlib
import os
import pickle
import random
import resource
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from windlass.checkpoint.files import Files
from windlass.cli.main import main
from windlass.compat.readers import torch_reader
from windlass.compat.readers.torch_file import Unread, open_torch_file
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


def write(path: Path, data: bytes) -> Path:
    """A container of `torch.save` with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", bytes(40))
        archive.writestr("archive/version", b"3\n")
    return path


def read(data: bytes, *, objects: bool = False) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "file.pt", data)
        with open_torch_file(path, Files(), objects=objects) as file:
            return file.tree


@given(TREES)
@example(b"ctorch._utils\n_rebuild_sparse_tensor\n")
def test_plain_data_comes_back(tree: Any) -> None:
    assert read(pickle.dumps(tree, protocol=2)) == tree


def test_shared_and_counted_values() -> None:
    shared = [1, 2]
    tree = {"a": shared, "b": (shared, shared), "c": collections.Counter("abca")}
    assert read(pickle.dumps(tree, protocol=2)) == {
        "a": [1, 2], "b": ([1, 2], [1, 2]), "c": {"a": 2, "b": 1, "c": 1}
    }  # fmt: skip


def test_numbers_of_numpy_become_plain_numbers() -> None:
    numbers = [np.float64(0.1), np.float32(2.5), np.int64(-3), np.bool_(True), np.float64(0.3)]
    got = read(pickle.dumps(numbers, protocol=2))
    assert got == [0.1, 2.5, -3, True, 0.3]
    assert [type(value) for value in got] == [float, float, int, bool, float]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6, dtype="i2").reshape(2, 3)), np.zeros((0, 3), "f4"),
        np.array(7, "u8"), np.array([True, False]), np.arange(20)[::3],
    ],
)  # fmt: skip
def test_arrays_of_numpy_come_back(array: np.ndarray[Any, Any]) -> None:
    got = read(pickle.dumps({"a": array, "state": np.random.RandomState(3).get_state()}, protocol=2))
    assert (got["a"].dtype, got["a"].shape, got["a"].tobytes()) == (array.dtype, array.shape, array.tobytes())
    restored = np.random.RandomState(4)
    restored.set_state(got["state"])
    assert restored.rand() == np.random.RandomState(3).rand()
    got["a"].flags.writeable = True  # numpy refuses this for an array over bytes


def test_depth_up_to_the_bound_is_read() -> None:
    assert read(nested_list(torch_reader.MAX_DEPTH)) is not None


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
    "getattr": (pickle.dumps(Calls(getattr, [], "append"), protocol=2), "getattr"),
    "evaluation": (pickle.dumps(Calls(builtins.eval, "1"), protocol=2), "eval"),
    "object": (pickle.dumps(Plain(), protocol=2), "Plain"),
    "class": (pickle.dumps(collections.deque, protocol=2), "deque"),
    "a class of the list alone": (pickle.dumps(collections.OrderedDict, protocol=2), "not plain data"),
    "another protocol": (pickle.dumps(Calls(os.putenv, WITNESS, "1"), protocol=4), "another pickle_protocol than 2"),
    "INST": (b"(ios\nsystem\n.", "opcode 0x69"),
    "OBJ": (b"(ccollections\nOrderedDict\no.", "opcode 0x6f"),
    "EXT": (b"\x80\x02\x82\x01.", "opcode 0x82"),
    "a name that does not end": (b"c" + b"a" * 1000, "damaged"),
    "attributes": (b"\x80\x02]}b.", "damaged"),
    "a call of a value": (b"\x80\x02K\x01)R.", "damaged"),
    "arguments that do not fit": (b"\x80\x02ctorch\nSize\nK\x01K\x02\x86R.", "damaged"),
    "a foreign reference": (b"\x80\x02X\x01\x00\x00\x00xQ.", "persistent_load"),
    "no storage": (
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x009X\x03\x00\x00\x00cpuK\x01tQ.",
        "data/9",
    ),
    "a storage alone": (
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0atQ.",
        "TypedStorage, which is not plain data",
    ),
    "nothing": (b"", "damaged"),
    "an odd map": (b"\x80\x02}(Nu.", "damaged"),
    "no mark": (b"\x80\x02Nt.", "damaged"),
    "a missing memo": (b"\x80\x02h\x07.", "damaged"),
    "a key that is a tuple": (pickle.dumps({(1, 2): 3}, protocol=2), "key of a map in it is a tuple"),
    "a set": (pickle.dumps({1}, protocol=2), "a set, which is not plain data"),
    "numpy's other order": (pickle.dumps(np.float64(1), protocol=2).replace(b"<", b">"), "little-endian"),
    "an array in numpy's other order": (pickle.dumps(np.ones(3, ">f4"), protocol=2), "not of plain numbers"),
    "an array of objects": (pickle.dumps(np.array([None, {}]), protocol=2), "not of plain numbers"),
    "an array of records": (pickle.dumps(np.zeros(2, "i4,f4"), protocol=2), "not of plain numbers"),
    "an array of times": (pickle.dumps(np.zeros(2, "M8[s]"), protocol=2), "not of plain numbers"),
    "an array without a state": (
        b"\x80\x02cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R.",
        "damaged",
    ),
    "an array with too large a shape": (
        pickle.dumps(np.ones(3), protocol=2).replace(b"K\x03\x85", b"M\xff\xff\x85"), "malformed",
    ),
    "an array with a shape past all numbers": (
        pickle.dumps(np.ones(3), protocol=2).replace(b"K\x03\x85", b"\x8a\x09" + b"\x7f" * 9 + b"\x85"), "malformed",
    ),
    "a text that claims gigabytes": (b"\x80\x02X" + struct.pack("<I", 0xFFFFFFF0) + b"x.", "damaged"),
    "text that is none": (b"\x80\x02X\x01\x00\x00\x00\xff.", "damaged"),
    "a tensor of terabytes": (b"\x80\x02ctorch\nTensor\nJ\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86R.", "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_anything_else_is_refused_by_name(name: str, tmp_path: Path) -> None:
    data, message = ATTACKS[name]
    path = write(tmp_path / "file.pt", data)
    with (
        pytest.raises(CheckpointError, match=rf"(?s)^.*file\.pt cannot be read: .*{message}"),
        open_torch_file(path, Files()) as file,
    ):
        assert file.tree is None
    assert WITNESS not in os.environ


OTHER_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
}


@pytest.mark.filterwarnings("ignore")  # of torch, that quantized and nested tensors will change
@pytest.mark.parametrize("kind", OTHER_TENSORS)
@pytest.mark.parametrize("objects", [False, True])
def test_other_kinds_of_tensors_are_refused_by_name(kind: str, objects: bool, tmp_path: Path) -> None:
    torch.save({"a": OTHER_TENSORS[kind]()}, tmp_path / "file.pt")
    with (
        pytest.raises(CheckpointError, match=rf"file\.pt cannot be read: a tensor in it is .*{kind}"),
        open_torch_file(tmp_path / "file.pt", Files(), objects=objects),
    ):
        pass


def test_a_file_without_checksums_is_refused_with_the_option_it_was_saved_with(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save([1], tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with (
        pytest.raises(CheckpointError, match=r"damaged, or was saved after .*set_crc32_options\(False\)"),
        open_torch_file(tmp_path / "file.pt", Files()),
    ):
        pass


def test_devices_and_dtypes_come_back(tmp_path: Path) -> None:
    kept = {"device": torch.device("cuda", 1), "host": torch.device("cpu"), "dtype": torch.bfloat16}
    torch.save(kept, tmp_path / "file.pt")
    with open_torch_file(tmp_path / "file.pt", Files()) as file:
        assert file.tree == kept


# --- what would take too much memory or time


def memoised(build: bytes) -> bytes:
    """The beginning of a tuple, whose first item can be referred to."""
    return b"\x80\x02(" + build + b"q\x00"


def nested_list(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def doubled_tuple(levels: int) -> bytes:
    """Makes a tuple of twice the tuple below, on every level: small in the file and in memory, endless to walk
    through.
    """
    return b"N" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(levels))


def long_text(count: int) -> bytes:
    return b"X" + struct.pack("<I", count) + b"a" * count


def many(count: int) -> bytes:
    """A tuple of this many numbers."""
    return b"(" + b"K\x01" * count + b"t"


def copies(name: bytes, argument: bytes, count: int, more: bytes = b"") -> bytes:
    """Calls of a function on one large argument, all of whose results are kept."""
    call = b"c" + name + b"\nh\x00" + (more + b"\x86" if more else b"\x85") + b"R"
    return memoised(argument) + call * count + b"t."


MAP = b"}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(20_000)) + b"u"
BOMBS: dict[str, Callable[[], bytes]] = {
    "nested lists": lambda: nested_list(1000),
    "deeply nested lists": lambda: nested_list(100_000),
    "doubled tuples": lambda: b"\x80\x02" + doubled_tuple(60) + b".",
    "doubled tuples as a key": lambda: b"\x80\x02}" + doubled_tuple(60) + b"Ns.",
    "doubled tuples as a device": lambda: b"\x80\x02ctorch\ndevice\n" + doubled_tuple(60) + b"\x85R.",
    "doubled tuples as a type": lambda: b"\x80\x02cnumpy\ndtype\n" + doubled_tuple(60) + b"\x85R.",
    "a list of itself": lambda: b"\x80\x02]q\x00h\x00a.",
    "ordered maps of one map": lambda: copies(b"collections\nOrderedDict", MAP, 12_000),
    "sizes of one tuple": lambda: copies(b"torch\nSize", many(30_000), 15_000),
    "bytes of one text": lambda: copies(
        b"_codecs\nencode", long_text(300_000), 15_000, b"X\x06\x00\x00\x00latin1"
    ),
    "counters of one text": lambda: copies(b"collections\nCounter", long_text(300_000), 15_000),
    "one text many times": lambda: memoised(long_text(300_000)) + b"h\x00" * 100_000 + b"t.",
    "one list of lists many times": lambda: (
        memoised(b"](" + b"]" * 10_000 + b"e") + b"h\x00" * 500 + long_text(1_000_000) + b"t."
    ),
    "tensors with many extras": lambda: (
        memoised(b"(" + b"N" * 200_000 + b"t") + b"ctorch._utils\n_rebuild_tensor_v2\nh\x00R" * 1000 + b"t."
    ),
    "bytes by their number": lambda: b"\x80\x02c__builtin__\nbytes\n\x8a\x06\x00\x00\x00\x00\x00\x10\x85R.",
    "bytearrays by their number": lambda: (
        b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x10\x85R."
    ),
}


@contextlib.contextmanager
def little_memory(extra: int) -> Any:
    """This process may take little more memory than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, and a reader that runs already: the limit of the tests is not for it."""
    folder = tmp_path_factory.mktemp("bombs")
    for name, make in BOMBS.items():
        write(folder / f"{name}.pt", make())
    assert read(b"\x80\x02N.") is None
    return folder


CASES = [(name, False) for name in BOMBS] + [
    (name, True) for name in ("doubled tuples", "one text many times", "sizes of one tuple")
]


@pytest.mark.parametrize(("name", "objects"), CASES)
def test_what_would_take_too_much_is_refused_by_name(name: str, objects: bool, bombs: Path) -> None:
    """In this process, and within the limits of the file in the other one."""
    path = bombs / f"{name}.pt"
    with (
        little_memory(1 << 28),
        pytest.raises(CheckpointError, match=f"{name}.pt cannot be read: "),
        open_torch_file(path, Files(), objects=objects),
    ):
        pytest.fail("it was read")


def test_names_that_objects_may_have_are_bounded(tmp_path: Path) -> None:
    """Names are read from the pickle's text alone, never made of texts on its stack."""
    content = b"\x80\x02" + long_text(100_000) + b"q\x00" + b"h\x00h\x00\x93" * 1000 + b"."
    with (
        pytest.raises(CheckpointError, match="opcode 0x93"),
        open_torch_file(write(tmp_path / "names.pt", content), Files(), objects=True),
    ):
        pytest.fail("it was read")


def test_the_limits_grow_with_the_file_up_to_a_bound() -> None:
    small, large = torch_reader.limits(100_000), torch_reader.limits(1 << 40)
    assert small[0] < 300 << 20
    assert small[1] <= 11
    assert all(one < other for one, other in zip(small, large, strict=True))
    assert large[0] <= 3 << 30


def test_less_than_the_limits_is_enough() -> None:
    """`ulimit -v` and batch systems set limits that a process cannot raise."""
    codecs.lookup("ascii")  # a user without rights can't import it
    child = os.fork()
    if child == 0:
        try:
            for kind, most in ((resource.RLIMIT_AS, 1 << 40), (resource.RLIMIT_CPU, 1000)):
                resource.setrlimit(kind, (most, most))
            if os.getuid() == 0:  # who may raise them
                os.setuid(65534)
            torch_reader._limit(1 << 41, 2000)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_export_of_such_a_file_ends_with_one_line(
    bombs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bombs / "sizes of one tuple.pt").rename(tmp_path / "pytorch_model.bin")
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "out.safetensors")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "pytorch_model.bin cannot be read: reading it takes more than" in said[0]


def test_the_process_that_ends_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends if no process asks for some seconds, or if the system ends it."""
    from windlass.compat.readers import reader_process

    assert read(b"\x80\x02K\x01.") == 1
    (reader,) = reader_process._running
    reader._process.kill()
    reader._process.wait()
    assert read(b"\x80\x02K\x02.") == 2


# --- any bytes


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_one_kind_of_error(data: bytes) -> None:
    _value_or_error(lambda: read(data))


def test_any_damage_is_a_value_or_one_kind_of_error() -> None:
    tree = {"a": [1, 2.5, (None, "text", b"x" * 300)], "b": np.float64(1), "c": {"d": 1 << 80}}
    whole, chance = pickle.dumps(tree, 2), random.Random(0)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        _value_or_error(lambda data=data: read(bytes(data)))  # type: ignore[misc]


def _value_or_error(body: Callable[[], Any]) -> None:
    """Any other error than this one would end the test."""
    with contextlib.suppress(CheckpointError):
        body()


# --- objects


class Holder(list[int]):
    """An object with items."""


def test_objects_are_left_unread_where_a_reader_allows_them() -> None:
    """Neither their classes nor their functions are looked up, and values beside them are read."""
    content = {
        "plain": [1, 2],
        "object": Plain(),
        "called": Calls(contextlib.suppress, ValueError),
        "kind": collections.deque,
        "set": {1, 2},
        "map": collections.defaultdict(list, {"a": 1}),
    }
    got = read(pickle.dumps(content, protocol=2), objects=True)
    assert got["plain"] == [1, 2]
    assert got["map"] == {"a": 1}
    names = {key: value.name.rpartition(".")[2] for key, value in got.items() if isinstance(value, Unread)}
    assert names == {"object": "Plain", "called": "suppress", "kind": "deque", "set": "set"}
    assert WITNESS not in os.environ


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (Holder([1]), "Can only append to lists"),
        (Calls(os.putenv, WITNESS, "1"), "posix.putenv whose module posix is blocked"),
    ],
    ids=["items", "a function of the system"],
)
def test_objects_that_torch_refuses_whatever_is_allowed(content: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=rf"file\.pt cannot be read: .*{reason}") as caught:
        read(pickle.dumps({"a": content}, protocol=2), objects=True)
    assert "Re-running" not in str(caught.value)  # what torch advises to read it all the same
    assert WITNESS not in os.environ
