"""One canonical form for every way to write a value."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from windlass.config import kinds
from windlass.config.parallel.table import KEYS


class _ByName(Enum):
    FULL_SHARD = 1


class _ByValue(StrEnum):
    ANYTHING = "full_shard"


@pytest.mark.parametrize(
    ("read", "raw", "value"),
    [
        (kinds.flag, "Yes", True),
        (kinds.flag, "off", False),
        (kinds.flag, 1, True),
        (kinds.whole, " 7 ", 7),
        (kinds.natural, "100000000.0", 100_000_000),
        (kinds.number, "0.5", 0.5),
        (kinds.number, ".0", 0.0),
        (kinds.port, 0, 0),
        (kinds.text, 3, "3"),
        (kinds.words, "A, B,", ("A", "B")),
        (kinds.words, ["A"], ("A",)),
        (kinds.options, "a=1,b=x", {"a": "1", "b": "x"}),
        (kinds.options, ["CUDA=0,1", "b=2"], {"CUDA": "0,1", "b": "2"}),
        (kinds.plain_options, "a=1,b=true,c=max", {"a": 1, "b": True, "c": "max"}),
        (kinds.OneOf("full_shard"), _ByName.FULL_SHARD, "full_shard"),
        (kinds.OneOf("full_shard"), _ByValue.ANYTHING, "full_shard"),
        (kinds.OneOf("Full"), "fULL", "Full"),
        (KEYS["fsdp.reshard_after_forward"].read, "SHARD_GRAD_OP", "shard_grad_op"),
        (KEYS["fsdp.reshard_after_forward"].read, 4, 4),
        (KEYS["fsdp.reshard_after_forward"].read, "false", False),
        (KEYS["fsdp.forward_prefetch"].read, 2, 2),
        (KEYS["fsdp.forward_prefetch"].read, "true", True),
        (KEYS["strategy"].read, "MULTI_GPU", None),
        (KEYS["strategy"].read, False, None),
        (KEYS["strategy"].read, "FSDP", "fsdp"),
        (KEYS["compile.backend"].read, "AOT_EAGER", "aot_eager"),
    ],
)
def test_reads(read: Any, raw: Any, value: Any) -> None:
    found = read(raw)
    assert (found, type(found)) == (value, type(value))
    if value is not None:
        assert read(found) == found


@pytest.mark.parametrize(
    ("read", "raw", "why"),
    [
        (kinds.flag, "perhaps", "true or false"),
        (kinds.whole, True, "whole number"),
        (kinds.whole, 1.5, "whole number"),
        (kinds.whole, "1.5", "whole number"),
        (kinds.positive, 0, "at least 1"),
        (kinds.natural, -1, "negative"),
        (kinds.port, 70000, "65535"),
        (kinds.number, "fast", "number"),
        (kinds.text, True, "text"),
        (kinds.words, 3, "list of names"),
        (kinds.options, "a", "name=value"),
        (kinds.options, 3, "mapping"),
        (kinds.OneOf("a", refused={"b": "is gone"}), "B", "is gone"),
        (kinds.OneOf("a"), "c", "one of a"),
        (KEYS["fp8.backend"].read, "TE", "needs Transformer Engine, which is not built"),
        (KEYS["strategy"].read, "MEGATRON_LM", "Megatron"),
        (KEYS["compile.mode"].read, "fast", "max-autotune"),
        (KEYS["fsdp.state"].read, "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        (KEYS["fsdp.reshard_after_forward"].read, "sometimes", "true, false"),
    ],
)
def test_says_what_it_needs(read: Any, raw: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(raw)


@example("~no such user")
@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())))
def test_every_reader_reads_or_says_why(raw: Any) -> None:
    for key in KEYS.values():
        try:
            value = key.read(raw)
        except ValueError:
            continue
        assert value is None or key.read(value) == value or value != value
