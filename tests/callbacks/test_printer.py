"""The plain printer."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.callbacks.progress import PrinterCallback
from windlass.core.events import TrainerControl, TrainerState


def test_prints_a_dict_and_leaves_the_logs_alone(capsys: pytest.CaptureFixture[str], make_args: Any) -> None:
    logs = {"loss": 1.23456789, "total_flos": 3.0, "note": "x"}
    PrinterCallback().on_log(make_args(), TrainerState(), TrainerControl(), logs=logs)
    assert capsys.readouterr().out == "{'loss': '1.235', 'note': 'x'}\n"
    assert logs["total_flos"] == 3.0


def test_silent_on_other_processes_and_without_logs(
    capsys: pytest.CaptureFixture[str], make_args: Any
) -> None:
    PrinterCallback().on_log(
        make_args(), TrainerState(is_local_process_zero=False), TrainerControl(), logs={"a": 1}
    )
    PrinterCallback().on_log(make_args(), TrainerState(), TrainerControl(), logs=None)
    assert capsys.readouterr().out == ""
