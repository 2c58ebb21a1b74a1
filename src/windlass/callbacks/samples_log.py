"""`samples.json`: some rows of the training data as the model gets them, written once, with the first batch of a run.

A list of samples, each with `name` (of its dataset, and its row), `tokens`, `trained` (tokens with a label), `pieces`
(pairs of a text and whether it is trained on) and, for a row with one label, `label`.

They stay on this machine: a run with a remote folder, to which its files are uploaded, does not write them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.events import TrainerState
from windlass.core.locations import is_url, local_folder
from windlass.core.logs import get_logger
from windlass.core.whole_file import read_json, write_whole

logger = get_logger(__name__)

FILE_NAME = "samples.json"
_MOST_BYTES = 1 << 20

Samples = list[dict[str, Any]]


class SamplesLog(TrainerCallback):
    """Writes `samples.json` into the output folder, on the main process, unless that is a remote folder. A resumed run
    keeps the file that it finds.
    """

    def __init__(self) -> None:
        self._path: Path | None = None  # of a file that is to be written

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._path = None
        if state.is_world_process_zero and not is_url(args.output_path):
            path = local_folder(args.output_path) / FILE_NAME
            if state.global_step == 0:
                with contextlib.suppress(OSError):
                    path.unlink()  # of an earlier run
            self._path = None if path.is_file() else path

    def first_batch(self, batch: Any, samples: Callable[[Any], Samples]) -> None:
        """Write the file. Called with the first batch of a call of `train()`, before its first update.

        Args:
            samples: returns the rows of a batch; nothing is written if there are none.
        """
        path, self._path = self._path, None
        if path is None:
            return
        try:
            found = samples(batch)
            if found:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps(found, indent=1) + "\n")
                logger.info(
                    "%s has %d rows of the training data as text, for the page of the run", path, len(found)
                )
        except Exception as error:  # of a tokenizer or a disk: the page has no samples then
            logger.warning("%s could not be written; training continues: %r", path, error)


def read_samples(folder: Path) -> Samples:
    """Return the samples of a run; those that are damaged are left out."""
    found = read_json(folder / FILE_NAME, _MOST_BYTES)
    return [one for one in found if _is_sample(one)] if isinstance(found, list) else []


def _is_sample(one: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(one.get("pieces"), list):
        return False
    counts = all(type(one.get(name)) is int for name in ("tokens", "trained"))
    return (
        counts
        and isinstance(one.get("label", ""), str)
        and isinstance(one.get("name"), str)
        and all(map(_is_piece, one["pieces"]))
    )


def _is_piece(piece: Sequence[Any]) -> bool:
    return (
        isinstance(piece, list) and len(piece) == 2 and isinstance(piece[0], str) and type(piece[1]) is bool
    )
