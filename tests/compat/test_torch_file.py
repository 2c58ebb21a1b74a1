"""Files of `torch.save` give the tensors that were saved, one by one; a container made by an enemy is refused."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.checkpoint.files import Files
from windlass.compat.readers import torch_file
from windlass.compat.readers.torch_file import open_torch_file
from windlass.core.errors import CheckpointError


def read(path: Path) -> Any:
    with open_torch_file(path, Files()) as file:
        return file.materialised(file.tree)


def assert_same(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert torch.equal(
            mine.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)
        )
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs)
        for key in theirs:
            assert_same(mine[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert type(mine) is type(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    else:
        assert mine == theirs


def optimizer_state() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for _ in range(2):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return optimizer.state_dict()


def various_tensors() -> Any:
    base = torch.arange(24.0).reshape(4, 6)
    dtypes = (
        torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    )  # fmt: skip
    return {
        "whole": base, "transposed": base.t(), "row": base[2], "strided": base[1:, ::2], "again": base,
        "empty": torch.empty(0, 3), "scalar": torch.tensor(7), "parameter": torch.nn.Parameter(torch.ones(3)),
        "expanded": torch.arange(3)[:, None].expand(3, 4), "of one element": torch.tensor(2.0).expand(2, 3),
        **{str(dtype): torch.arange(3).to(dtype) for dtype in dtypes}, "complex": torch.randn(3, dtype=torch.complex64),
    }  # fmt: skip


@pytest.mark.parametrize(
    "make", [optimizer_state, various_tensors, lambda: torch.nn.BatchNorm1d(3).state_dict()]
)
def test_what_was_saved_comes_back(make: Any, tmp_path: Path) -> None:
    saved = make()
    torch.save(saved, tmp_path / "x.pt")
    assert_same(read(tmp_path / "x.pt"), saved)


def test_a_tensor_of_any_device_is_read_on_the_host(tmp_path: Path) -> None:
    content = members({"a": torch.arange(3.0)})
    name = named(content, "data.pkl")
    content[name] = content[name].replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:7")
    assert torch.equal(read(packed(tmp_path / "x.pt", content))["a"], torch.arange(3.0))


def test_a_tensor_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """Opening a file reads no tensor: damage is found where it is."""
    torch.save({"a": torch.ones(1000), "b": torch.full((3,), 2.0)}, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(content.replace(struct.pack("f", 1) * 10, struct.pack("f", 3) * 10))
    with open_torch_file(tmp_path / "x.pt", Files()) as file:
        assert torch.equal(file.read(file.tree["b"]), torch.full((3,), 2.0))
        assert torch.equal(file.read_run(file.tree["b"], 1, 2), torch.full((2,), 2.0))
        for body in (lambda: file.read(file.tree["a"]), lambda: file.read_run(file.tree["a"], 999, 1)):
            with pytest.raises(CheckpointError, match=r"x\.pt cannot be read: the storage .* is damaged"):
                body()


def test_tensors_are_memory_of_their_own(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    torch.save({"whole": base, "tied": base, "half": base[:3]}, tmp_path / "x.pt")
    with open_torch_file(tmp_path / "x.pt", Files()) as file:
        found = {name: file.read(tensor) for name, tensor in file.tree.items()}
        for tensor in found.values():
            tensor.add_(1)
    assert all(torch.equal(found[name], base + 1) for name in ("whole", "tied"))
    assert torch.equal(found["half"], base[:3] + 1)


def test_equal_tensors_are_one(tmp_path: Path) -> None:
    weight = torch.ones(4)
    torch.save({"a": weight, "b": weight}, tmp_path / "x.pt")
    got = read(tmp_path / "x.pt")
    assert got["a"] is got["b"]


# --- containers of an enemy


def members(tree: Any) -> dict[str, bytes]:
    """What `torch.save` puts into its container."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path: Path, content: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def named(content: dict[str, bytes], end: str) -> str:
    return next(name for name in content if name.endswith(end))


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    content = members({"a": torch.zeros(1 << 20)})
    refused(packed(tmp_path / "x.pt", content, zipfile.ZIP_DEFLATED), "compressed or encrypted")


DESCRIPTIONS: list[tuple[Any, str]] = [
    ({"tensor": [0, 40, 0, "float32", 0, [11], [1]]}, "does not lie inside its storage"),
    ({"tensor": [0, 40, 0, "float32", -1, [10], [1]]}, "shape of a tensor is malformed"),
    ({"tensor": [0, 40, 0, "float32", 0, [10], [-1]]}, "shape of a tensor is malformed"),
    ({"tensor": [0, 40, 0, "float32", 0, [1 << 40], [0]]}, "twice the bytes"),
    ({"tensor": [0, 40, 0, "float32", 9, [2], [1]]}, "does not lie inside its storage"),
    ({"tensor": [0, 40, 0, "float32", 0, ["1"], [1]]}, "shape of a tensor is malformed"),
    ({"tensor": [80, 40, 0, "float32", 0, [10], [1]]}, "claim more bytes"),
    ({"tensor": [-8, 40, 0, "float32", 0, [10], [1]]}, "claim more bytes"),
    ([{"tensor": [at, 40, 0, "float32", 0, [10], [1]]} for at in range(3)], "claim more bytes"),
    (
        [{"tensor": [0, 40, 0, "float32", 0, [a, 10 // a], [1, 1]]} for a in (1, 2, 5, 10)] * 2,
        "twice the bytes",
    ),
    ({"tensor": [0, 40, 0, "qint8", 0, [10], [1]]}, "not supported"),
    ({"tensor": [0]}, "malformed"),
    ({"map": [1]}, "malformed"),
    ({"map": [[], 1]}, "malformed"),
    ({"map": [{"map": []}, 1]}, "malformed"),
    ({"bytes": "g"}, "malformed"),
    ({"device": "nowhere"}, "malformed"),
    ({"error": 1, "a": 2}, "malformed"),
]


@pytest.mark.parametrize(("description", "message"), DESCRIPTIONS, ids=lambda value: str(value)[:40])
def test_what_the_other_process_answers_is_checked(
    description: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opened a pickle that another program wrote."""
    monkeypatch.setattr(torch_file, "describe", lambda file, path, objects: description)
    path = tmp_path / "x.pt"
    path.write_bytes(
        b"PK\x03\x04".ljust(80, b"\0") if "twice" not in message else b"PK\x03\x04".ljust(44, b"\0")
    )
    refused(path, message)


def test_storages_of_another_size_are_refused(tmp_path: Path) -> None:
    content = members({"a": torch.zeros(10)})
    content[named(content, "data/0")] = bytes(36)
    refused(packed(tmp_path / "x.pt", content), r"a tensor of shape \[10\] does not lie inside its storage")


def test_a_missing_storage_is_refused(tmp_path: Path) -> None:
    content = members({"a": torch.zeros(10)})
    del content[named(content, "data/0")]
    refused(packed(tmp_path / "x.pt", content), "data/0")


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1 << 40,), (0,)),
        ((11,), (1,)),
        ((2,), (10,)),
        ((2,), (1, 1)),
        ((True,), (1,)),
        (([3],), (1,)),
    ],
)
def test_tensors_lie_inside_their_storages(shape: Any, stride: Any, tmp_path: Path) -> None:
    content = members({"a": torch.zeros(10)})
    name = named(content, "data.pkl")
    content[name] = with_shape(content[name], shape, stride)
    refused(packed(tmp_path / "x.pt", content), "shape|lie inside|damaged|twice the bytes")


def with_shape(data: bytes, shape: Any, stride: Any) -> bytes:
    """The pickle of a tensor of shape (10,) and stride (1,), with others in their place."""
    start = data.index(b"K\x0a\x85")
    end = data.index(b"K\x01\x85", start) + 3
    forged = b"".join(pickle.dumps(numbers, protocol=2)[2:-1] for numbers in (shape, stride))
    return data[:start] + forged + data[end:]


def test_big_endian_and_programs_are_refused(tmp_path: Path) -> None:
    content = members({"a": torch.zeros(10)})
    content[named(content, "byteorder")] = b"big"
    refused(packed(tmp_path / "x.pt", content), "little-endian")
    script = torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    torch.jit.save(script, tmp_path / "script.pt")
    refused(tmp_path / "script.pt", "no program")


def test_two_of_the_same_name_are_refused(tmp_path: Path) -> None:
    content = members({"a": torch.zeros(10)})
    path = packed(tmp_path / "x.pt", content)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(named(content, "byteorder"), b"little")
    refused(path, "same name")


def test_other_formats_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(10)}, path, _use_new_zipfile_serialization=False)
    refused(path, r"torch\.save\(torch\.load\(path, weights_only=True\), path\)")
    path.write_bytes(pickle.dumps({"a": 1}))
    refused(path, "not a zip container")
    path.write_bytes(b"")
    refused(path, "not a zip container")
    path.unlink()
    refused(path, "is missing")
    os.mkfifo(path)
    refused(path, "not a plain file")


def test_any_damage_is_a_value_or_one_kind_of_error(tmp_path: Path) -> None:
    torch.save(optimizer_state(), tmp_path / "x.pt")
    whole, chance, path = (tmp_path / "x.pt").read_bytes(), random.Random(0), tmp_path / "y.pt"
    refused_count = 0
    for number in range(100):
        data = bytearray(whole)
        data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data if number % 5 else data[: chance.randrange(len(data))])
        try:
            read(path)
        except CheckpointError:  # any other error would end the test
            refused_count += 1
    assert refused_count > 20
