from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from windlass.checkpoint.codec import (
    as_tensors,
    decode,
    encode,
    load_state,
    same_value,
    save_state,
    state_bytes,
)
from windlass.core.errors import CheckpointError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(x) is type(y) for x, y in zip(a, b, strict=True))
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex()
    return bool(a == b)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(
        0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    ).view(dtype).reshape(shape)
    if dtype is not torch.bool
    else torch.ones(shape, dtype=dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 1000),
)  # fmt: skip
arrays = hnp.arrays(
    st.sampled_from(["f8", "f4", "f2", "i8", "i2", "u1", "u4", "u8", "?", "c8", "c16"]),
    hnp.array_shapes(min_dims=0, max_dims=2, max_side=3),
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors | arrays
    | st.floats(width=32).map(np.float32) | st.integers(-100, 100).map(np.int16)
)  # fmt: skip
keys = st.text(max_size=4) | st.integers() | st.sampled_from(["$tensor", "$map", "a/b", "a", "b", "a.b"])
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(state=st.dictionaries(keys, states, max_size=4))
def test_any_state_comes_back_to_the_bit(
    state: dict[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stem = tmp_path_factory.mktemp("codec") / "some.part"
    save_state(stem, state)
    assert same(load_state(stem), state)
    json.loads(
        (stem.parent / "some.part.json").read_text(), parse_constant=pytest.fail
    )  # strict JSON: others can read it


def test_plain_values_stand_for_themselves() -> None:
    state = {"step": 3, "lr": 0.1, "name": "adamw", "flags": [True, None], "inner": {"a": -0.0}}
    tree, found = encode(state)
    assert tree == state
    assert not found


def test_a_state_without_tensors_is_one_file(tmp_path: Path) -> None:
    assert set(save_state(tmp_path / "trainer_state", {"a": 1})) == {"trainer_state.json"}
    assert json.loads((tmp_path / "trainer_state.json").read_text()) == {"a": 1}


@given(state=states)
def test_bytes_are_known_beforehand(state: Any) -> None:
    def scalars(value: Any) -> int:
        if isinstance(value, np.generic):
            return value.nbytes
        items = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        )
        return sum(map(scalars, items))

    exact = sum(tensor.numel() * tensor.element_size() for tensor in encode(state)[1].values())
    assert state_bytes(state) == exact - scalars(state)  # a numpy scalar is some bytes; not worth a look


def test_two_paths_that_spell_one_name_stay_apart() -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    state = {"a/b": one, "a": {"b": two}}
    assert same(decode(*encode(state)), state)


def test_views_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "t": base.T,
        "row": base[1],
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
    }
    save_state(tmp_path / "x", state)
    loaded = load_state(tmp_path / "x")
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    loaded["row"].zero_()
    assert torch.equal(loaded["t"], base.T)  # memory of its own
    (foreign,) = decode(*encode([np.arange(3, dtype=">i4")]))
    assert foreign.tolist() == [0, 1, 2], "of the other order of bytes"


class Named(tuple):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"), (bytearray(b"raw"), "bytearray"), (object(), "object"),
        (print, "builtin_function"), (1j, "complex"),
        (torch.float32, "dtype"), (Path("x"), "Path"), (Named((1,)), "Named"),
        (np.array(["a"]), "<U1"), (np.array([object()]), "object"), (np.ma.masked_array([1.0], [True]), "MaskedArray"),
    ],
)  # fmt: skip
def test_any_other_type_is_refused_by_path_and_type(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'groups\.1\.extra'.*{kind}"):
        encode({"groups": [{}, {"extra": value}]})


def test_a_number_that_could_not_be_read_again_is_refused() -> None:
    assert decode(*encode([1 << 8191])) == [1 << 8191]
    with pytest.raises(CheckpointError, match=r"'0' is a whole number of 8193 bits"):
        encode([1 << 8192])


def test_values_are_the_same_if_their_tensors_are() -> None:
    assert same_value({"a": torch.ones(2)}, {"a": torch.ones(2)})
    assert not same_value({"a": torch.ones(2)}, {"a": torch.zeros(2)})
    assert not same_value({"a": 1}, {"a": 2})


def test_two_values_of_a_model_do_not_share_a_name() -> None:
    with pytest.raises(CheckpointError, match="'a#json' exists twice"):
        as_tensors({"a#json": torch.ones(2), "a": 3})


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.nested.nested_tensor([torch.ones(1)]), "is a nested tensor"),
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "strided|dense"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_a_file_cannot_hold_are_refused(build: Callable[[], torch.Tensor], why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'a\.b'.*({why})"):
        encode({"a": {"b": build()}})


@pytest.mark.parametrize("key", [1.5, True, None, (1, 2)])
def test_other_keys_are_refused(key: Any) -> None:
    with pytest.raises(CheckpointError, match="key"):
        encode({"a": {key: 1}})


def test_a_cycle_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(CheckpointError, match="deep"):
        encode(state)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "absent"}, {"$tensor": 3}, {"$tensor": None}, {"$array": "absent"}, {"$float": "1.0"},
        {"$float": []}, {"$tuple": 3},
        {"$map": 3}, {"$map": [[1]]}, {"$map": [[[], 1]]}, {"$map": [[None, 1]]}, {"$class": "os.system"},
        {"$tensor": "a", "complex": True},
        [{"$tensor": "a"}, {"$tensor": "a"}],
    ],
)  # fmt: skip
def test_a_malformed_tree_is_one_clear_error(tree: Any) -> None:
    with pytest.raises(CheckpointError):
        decode({"x": tree}, {"a": torch.zeros(3)})


def test_a_tensor_file_that_is_missing_is_named(tmp_path: Path) -> None:
    save_state(tmp_path / "optimizer", {"a": torch.ones(2)})
    (tmp_path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        load_state(tmp_path / "optimizer")
