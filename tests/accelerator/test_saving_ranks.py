"""Saves on two ranks: disks of their own, URLs, adapters, in the background, and on the main process alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.accelerator.loop_cases import tiny
from tests.dist.launch import launch, on_ranks

from windlass import Accelerator
from windlass.accelerator import loop_saver

HERE = Path(__file__).parent


@pytest.mark.dist
def test_two_ranks_save_wherever_they_are(tmp_path: Path) -> None:
    said = launch(2, HERE / "saving_ranks.py", tmp_path)
    assert said.count("SAVED ON ALL") == 2
    assert said.count("safe_serialization=False has no effect") == 1, "the main process warns for all"


@pytest.mark.dist
def test_the_main_process_saves_a_replicated_model_alone(tmp_path: Path) -> None:
    assert on_ranks(2, save_alone, tmp_path) == [True, True]


def save_alone(folder: Path) -> bool:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tiny())
    if accelerator.is_main_process:
        accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    wanted = accelerator.get_state_dict(model)
    return load_file(folder / "model.safetensors").keys() == wanted.keys()


@pytest.mark.dist
def test_a_save_on_the_main_process_alone_is_named(tmp_path: Path) -> None:
    first, second = on_ranks(2, wait_for_the_other, tmp_path)
    assert "not under `if accelerator.is_main_process:`" in first
    assert second == ""


def wait_for_the_other(folder: Path) -> str:
    """The second rank comes only after the first warns why it waits."""
    loop_saver.PATIENCE = 0.01
    told: list[str] = []
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(tiny())

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            (folder / "told").touch()

    listener = Listener(logging.WARNING)
    logging.getLogger("windlass").addHandler(listener)
    try:
        if not accelerator.is_main_process:
            while not (folder / "told").exists():
                pass
            loop_saver.PATIENCE = 1000.0
        accelerator.save_state(folder / "state")
    finally:
        logging.getLogger("windlass").removeHandler(listener)
    return " ".join(told)
