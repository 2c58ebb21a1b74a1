"""`answers.jsonl`: what a model answered in its evaluations, one JSON object per prompt and evaluation.

A row has `step`, `set` (the name of the evaluation set, "eval" for the only one, "prompts" for `eval_prompts`),
`number` (of the row in its set, from 0), `prompt` (the text that the model read), `answer`, `reference` (null: there is
none), `scores` (of this answer, by name; empty without a reference) and `tokens` (of the answer, its end token
included). No value depends on the clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.callbacks.row_file import append_lines, cut_back, drop_torn_line, set_aside
from windlass.callbacks.rows import Row
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger
from windlass.core.output_folder import OutputFolder

logger = get_logger(__name__)

FILE_NAME = "answers.jsonl"


class AnswersLog(TrainerCallback):
    """Writes `answers.jsonl` into the output folder, on the main process only.

    A run that starts at step 0 renames an older file, and a resumed run truncates it to the step of its checkpoint, as
    `metrics.jsonl`. A failed write (full disk) is warned of, does not stop training, and its rows are lost.

    Args:
        output_dir: the run's folder; created when the first row is written.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        self.path = Path(output_dir).expanduser().absolute() / FILE_NAME
        self._folder: OutputFolder | None = None
        self._opened = False
        self._rows_before_training = False  # of this run: an evaluation before `train()`
        self._kept_at_cut: list[Row] = []

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if state.global_step > 0:
            self._cut_back(state.global_step)
        elif not self._rows_before_training:
            set_aside(self.path)
        self._rows_before_training, self._opened = False, True

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._kept_at_cut = []

    def roll_back(self, state: TrainerState) -> None:
        """Remove what was answered after the step that a run rolled back to."""
        if not state.is_world_process_zero:
            return
        try:
            self._cut_back(state.global_step)
        except OSError as error:
            logger.warning("%s still has the rows that were rolled back: %s", self.path, error)

    def _cut_back(self, step: int) -> None:
        try:
            self._kept_at_cut = cut_back(self.path, step)
        except (ValueError, KeyError, TypeError):
            logger.warning("%s is damaged and cannot be continued", self.path)
            set_aside(self.path)
            self._kept_at_cut = []

    def write(self, rows: Sequence[Row]) -> None:
        """Append the rows of one evaluation; those that a resumed run finds in the file are not repeated."""
        new = [row for row in rows if row not in self._kept_at_cut]
        try:
            self._folder = self._folder or OutputFolder(self.path.parent)
            self._folder.check()
            if not self._opened:
                self._open_outside_training()
            append_lines(self.path, *new)
        except OSError as error:
            message = "%s could not be written; training continues without the rows of this evaluation: %s"
            logger.warning(message, self.path, error)

    def _open_outside_training(self) -> None:
        if self.path.is_symlink():  # rows are never written to where a link leads
            set_aside(self.path)
        self._rows_before_training = not self.path.exists()
        drop_torn_line(self.path)
        self._opened = True
