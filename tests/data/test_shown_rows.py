from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.data.cases import Augmented, Numbers, Stream, train_loader
from tests.data.test_prepare_loader import prepare
from torch.utils.data import DataLoader, Subset, TensorDataset

from windlass.data.seeding import fingerprint
from windlass.data.shown_rows import rows_to_keep, shown_rows

ROWS = [{"x": float(i), "id": str(i)} for i in range(9)]
OTHER = [*ROWS[:-1], {"x": 8.5, "id": "8"}]


class OwnGenerator(Numbers):
    generator = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        return torch.rand((), generator=self.generator)


class Unreadable(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise OSError("not mounted")


class OfEpochs(list[Any]):
    def set_epoch(self, epoch: int) -> None: ...


def test_the_first_a_middle_and_the_last_row_are_shown() -> None:
    before, shown, changed = fingerprint(), shown_rows(ROWS) or [], shown_rows(OTHER) or []
    assert [place for place, _ in shown] == [0, 4, 8]
    assert shown == shown_rows(Dataset.from_list(ROWS))
    assert [place for place, found in changed if [place, found] not in shown] == [8]
    assert shown_rows(Augmented(3)) is not None
    assert fingerprint() == before, "no generator was moved"


@pytest.mark.parametrize("data", [[], OwnGenerator(3), Unreadable(3), Stream(Numbers(3)), None])
def test_nothing_is_shown_of_rows_that_do_not_come_alike(data: Any) -> None:
    assert shown_rows(data) is None


def test_a_checkpoint_keeps_rows_of_tables_alone() -> None:
    tensors = TensorDataset(torch.arange(6))
    for data in (ROWS, tuple(ROWS), Dataset.from_list(ROWS), tensors, Subset(tensors, [1, 4])):
        assert rows_to_keep(data) == shown_rows(data) is not None
    for other in (Numbers(3), Subset(Numbers(6), [1, 4]), OfEpochs(ROWS)):
        assert rows_to_keep(other) is None


def test_a_transform_is_not_run_for_a_checkpoint() -> None:
    generator = torch.Generator()
    before = generator.get_state()
    drawn = Dataset.from_list(ROWS).with_transform(
        lambda rows: {"x": torch.rand(len(rows["x"]), generator=generator)}
    )
    assert rows_to_keep(drawn) == shown_rows(ROWS)
    assert torch.equal(generator.get_state(), before)


def prepared(data: Any) -> Any:
    return prepare(DataLoader(data, batch_size=2), use_stateful_dataloader=True)


@pytest.mark.parametrize("make", [train_loader, prepared])
def test_a_position_in_other_rows_is_said(make: Callable[..., Any], said: pytest.LogCaptureFixture) -> None:
    state = json.loads(json.dumps(make(ROWS).state_dict()))
    make(list(ROWS)).load_state_dict(state)
    make(Dataset.from_list(ROWS)).load_state_dict(state)
    make(ROWS).load_state_dict({name: value for name, value in state.items() if name != "rows"})
    make(Numbers(9)).load_state_dict(state)
    assert not said.text
    make(OTHER).load_state_dict(state)
    assert "other rows than when the checkpoint was written: of the rows [0, 4, 8]" in said.text
    assert "[8] differ" in said.text
