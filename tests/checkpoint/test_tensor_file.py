from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from windlass.checkpoint import tensor_file
from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import DTYPES, open_tensors, read_run, write_tensors
from windlass.core.errors import CheckpointError, ModelError
from windlass.core.locations import loading
from windlass.dist.sharded import Part


def example() -> dict[str, torch.Tensor]:
    tensors = {f"t.{code}": torch.arange(6).reshape(2, 3).to(dtype) for code, dtype in DTYPES.items()}
    return tensors | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "turned": torch.rand(3, 2).T,
        "ö/ü": torch.ones(1),
    }


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    tensors = example()
    write_tensors(tmp_path / "x.safetensors", tensors, {"format": "pt"}, files=Files())
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].to(torch.float64), tensor.to(torch.float64))


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    """A clone without Git LFS has one in the place of each large file."""
    pointer = tmp_path / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a pointer of Git LFS.*git lfs pull"):
        with open_tensors(pointer, Files()):
            pass
    with pytest.raises(ModelError, match=r"the model .* cannot be loaded: .*model\.safetensors is a pointer"):
        with loading("model", str(tmp_path)):
            safetensors.torch.load_file(pointer)


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in example().items()}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"a": "b"})
    with open_tensors(tmp_path / "x.safetensors", Files()) as file:
        assert file.metadata == {"a": "b"}
        assert set(file.names) == set(tensors)
        for name, tensor in tensors.items():
            assert (file.shape(name), file.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
            assert torch.equal(file.read(name).to(torch.float64), tensor.to(torch.float64))


def test_columns_are_read_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_AT_ONCE", 2 * 4 * 4)  # two rows, so that one is left
    tensor = torch.rand(6, 4)
    write_tensors(tmp_path / "x.safetensors", {"a": tensor}, files=Files())
    with open_tensors(tmp_path / "x.safetensors", Files()) as file:
        assert torch.equal(file.read("a", Part((1, 1), (5, 2))), tensor[1:, 1:3])
        assert torch.equal(read_run(file, "a", 3, 7), tensor.flatten()[3:10])


def test_the_same_tensors_give_the_same_bytes_as_the_package(tmp_path: Path) -> None:
    tensors = {"b": torch.rand(3), "a": torch.ones(2, dtype=torch.int8), "c": torch.rand(2, 2)}
    write_tensors(tmp_path / "x.safetensors", tensors, files=Files())
    data = (tmp_path / "x.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    theirs = safetensors.torch.save(tensors)
    assert json.loads(theirs[8 : 8 + int.from_bytes(theirs[:8], "little")]) == header
    assert data[-(3 * 4 + 2 + 4 * 4) :] == theirs[-(3 * 4 + 2 + 4 * 4) :]


def test_the_data_begins_where_readers_can_map_it_into_memory(tmp_path: Path) -> None:
    for length in range(1, 5):
        path = tmp_path / str(length)
        write_tensors(path, {"x" * length: torch.ones(1)}, files=Files())
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def file_of(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD: dict[str, tuple[Any, bytes, int | None]] = {
    "empty file": (b"", b"", None),
    "absurd header": (b"{}", b"", 1 << 62),
    "header past the end": (b"{}", b"", 100),
    "header of 2^64-1": (b"{}", b"", (1 << 64) - 1),
    "no JSON": (b"\x80\x04\x95cos\nsystem\n", b"", None),
    "not a map": ([], b"", None),
    "key twice": (b'{"a": 1, "a": 2}', b"", None),
    "deep": (b"[" * 100_000, b"", None),
    "long number": (b'{"a": ' + b"9" * 10_000 + b"}", b"", None),
    "entry no map": ({"a": 3}, b"", None),
    "unknown dtype": ({"a": entry(0, 4, dtype="EVIL")}, bytes(4), None),
    "dtype no string": ({"a": entry(0, 4, dtype=["F32"])}, bytes(4), None),
    "shape no list": ({"a": entry(0, 4, shape=4)}, bytes(4), None),
    "negative shape": ({"a": entry(0, 4, shape=[-1, -1])}, bytes(4), None),
    "fractional shape": ({"a": entry(0, 4, shape=[1.0])}, bytes(4), None),
    "huge shape": ({"a": entry(0, 4, shape=[1 << 61, 1 << 61])}, bytes(4), None),
    "huge shape of nothing": ({"a": entry(0, 0, shape=[0, 1 << 61, 1 << 61])}, b"", None),
    "size of another shape": ({"a": entry(0, 4, shape=[2])}, bytes(4), None),
    "past the end": ({"a": entry(0, 8, shape=[2])}, bytes(4), None),
    "reversed": ({"a": entry(8, 4)}, bytes(8), None),
    "overlap": ({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4), None),
    "hole": ({"a": entry(4, 8)}, bytes(8), None),
    "trailing bytes": ({"a": entry(0, 4)}, bytes(8), None),
    "metadata no strings": ({"__metadata__": {"a": 1}}, b"", None),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_file_is_one_error_that_names_it(case: str, tmp_path: Path) -> None:
    header, data, length = BAD[case]
    path = file_of(tmp_path / "bad.safetensors", header, data, length)
    if case == "empty file":
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        with open_tensors(path, Files()) as file:
            file.read("a")
