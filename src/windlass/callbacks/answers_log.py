"""`answers.jsonl`: what a model answered in its evaluations, one JSON object per prompt and evaluation.

A row has `step`, `set` (the name of the evaluation set, "eval" for the only one, "prompts" for `eval_prompts`),
`number` (of the row in its set, from 0), `prompt` (the text that the model read), `answer`, `reference` (null: there is
none), `scores` (of this answer, by name; empty without a reference) and `tokens` (of the answer, its end token
included). No value depends on the clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from windlass.callbacks.row_file import RowFile
from windlass.callbacks.rows import Row
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.events import TrainerState
from windlass.core.locations import at_home
from windlass.core.logs import get_logger

logger = get_logger(__name__)

FILE_NAME = "answers.jsonl"


class AnswersLog(TrainerCallback):
    """Writes `answers.jsonl` into the output folder, on the main process only; each run into the folder that its
    arguments name when it begins.

    A run that starts at step 0 renames an older file, and a resumed run truncates it to the step of its checkpoint, as
    `metrics.jsonl`. A failed write (full disk) is warned of, does not stop training, and its rows are lost.

    Args:
        output_dir: the folder of this machine for evaluations before a run; created when the first row is written.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        self._file = RowFile(at_home(output_dir).absolute() / FILE_NAME)

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._file = self._file.of_run(args)
            self._file.begin(state.global_step)

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._file.end()

    def roll_back(self, state: TrainerState) -> None:
        """Remove what was answered after the step that a run rolled back to."""
        if state.is_world_process_zero:
            self._file.roll_back(state.global_step)

    def write(self, rows: Sequence[Row]) -> None:
        """Append the rows of one evaluation; those that a resumed run finds in the file are not repeated."""
        try:
            self._file.append(*[row for row in rows if not self._file.has(row)])
        except OSError as error:
            message = "%s could not be written; training continues without the rows of this evaluation: %s"
            logger.warning(message, self._file.path, error)
