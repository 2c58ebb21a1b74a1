"""A model that the main process cannot write: every rank of a `Trainer` gets the error, and can go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.dist.launch import on_ranks
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.dist.gang import current


@pytest.mark.dist
def test_all_ranks_get_the_error_of_a_model_that_one_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    found = on_ranks(2, save_in_vain, str(tmp_path))
    overridden = [one.pop("override") for one in found]
    assert overridden[0] == ["KeyError", "'of the script'"], "the script's own error, with its traceback"
    assert overridden[1] == ["CheckpointError", "rank 0: KeyError: 'of the script'"]
    assert found[0] == found[1]
    kind, text = found[0]["trainer"]
    assert (kind, str(tmp_path / "file") in text) == ("CheckpointError", True)


# --- what each rank runs ----------------------------------------------------------------------------------------------


class SavesBadly(Trainer):
    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        raise KeyError("of the script")


def save_in_vain(folder: str) -> dict[str, list[str]]:
    args, place = arguments(Path(folder, "run")), str(Path(folder, "file", "model"))
    trainer = Trainer(Net(), args, train_dataset=rows(8))
    badly = SavesBadly(Net(), args, train_dataset=rows(8))
    found = {
        "trainer": _error_of(lambda: trainer.save_model(place)),
        "override": _error_of(lambda: badly.save_model(place)),
    }
    assert current().gather_objects(current().rank) == [0, 1], "the ranks are in step"
    return found


def _error_of(save: Callable[[], None]) -> list[str]:
    try:
        save()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]
