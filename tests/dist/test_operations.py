"""Operations between processes; several processes in one launch, and a world of one here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch

from windlass.core.errors import ConfigError
from windlass.dist import operations


@pytest.mark.dist
def test_three_processes_agree_with_accelerate() -> None:
    said = launch(3, Path(__file__).with_name("operations_ranks.py"))
    assert said.count("agrees") == 3


def test_a_world_of_one_gives_back_what_it_was_given() -> None:
    nest = {"a": torch.ones(2, 3), "b": (torch.tensor(1.0),)}
    assert operations.gather(nest) is nest
    assert operations.broadcast(nest) is nest
    assert operations.pad_across_processes(nest, dim=1) is nest
    assert operations.gather_object("text") == "text"
    assert operations.broadcast_object_list([1, object]) == [1, object]


def test_a_nested_tensor_is_left_with_the_warning_of_the_peer_in_one_process_too() -> None:
    peer = pytest.importorskip("accelerate.utils")
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    for module in (operations, peer):
        with pytest.warns(module.CannotPadNestedTensorWarning) as caught:
            assert module.pad_across_processes({"a": nested})["a"] is nested
        assert [type(w.message) for w in caught] == [module.CannotPadNestedTensorWarning]


def test_a_world_of_one_reduces_into_a_new_tensor() -> None:
    value = torch.ones(2)
    reduced = operations.reduce({"a": value})["a"]
    assert torch.equal(reduced, value)
    assert reduced is not value
    with pytest.raises(ConfigError, match="none"):
        operations.reduce(value, "none")
