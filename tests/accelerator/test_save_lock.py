"""Two loops that save into one folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from windlass import Accelerator
from windlass.checkpoint import run_lock
from windlass.checkpoint.run_lock import FolderInUse, RunLock
from windlass.checkpoint.store import Store


def test_a_loop_that_finds_another_one_saving_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "GRACE", 0.1)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "state")
    draft = tmp_path / "tmp-state"
    draft.mkdir()  # of the other loop
    with RunLock(tmp_path, ".windlass-state.lock"):
        with pytest.raises(FolderInUse, match="another run"):
            accelerator.save_state(tmp_path / "state")
        assert draft.is_dir()
        accelerator.save_state(tmp_path / "elsewhere")
    with torch.no_grad():
        model.weight.zero_()
    accelerator.save_state(tmp_path / "state")
    Store(tmp_path, name="state").verify(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert not model.weight.any()
    assert not list(tmp_path.glob(".windlass-*"))
