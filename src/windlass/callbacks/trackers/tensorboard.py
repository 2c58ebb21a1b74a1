"""TensorBoard: event files in a folder."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

import yaml

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only, split_numbers
from windlass.core.locations import at_home
from windlass.core.metric_values import python_number
from windlass.core.optional import require
from windlass.core.whole_file import write_whole


@main_only
class TensorBoardTracker(PackageTracker):
    """Writes event files for TensorBoard.

    Args:
        run_name: the folder of this run below `logging_dir`.
        logging_dir: the folder of all runs.
        **kwargs: for `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    handle = "writer"
    closes = "close"
    writer: Any = None

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = os.path.join(logging_dir, run_name)

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In a new folder below `$TENSORBOARD_LOGGING_DIR`, or the folder `runs` of the output. A resumed run continues
        in the same folder, and hides what was logged after its checkpoint.
        """
        root = at_home(os.environ.get("TENSORBOARD_LOGGING_DIR") or facts.folder / "runs")
        if facts.run_id is not None:
            # The killed session may have logged updates that are made again: two values at one step zigzag in a chart.
            return cls(facts.run_id, root, purge_step=facts.step + 1)
        name = facts.name or f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        # An earlier run of this name, whose curves and those of this one would be drawn as one.
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return cls(next(name for name in names if not (root / name).exists()), root)

    @classmethod
    def of_writer(cls, writer: Any) -> Self:
        """The tracker on `writer`, a `SummaryWriter` that a script opened."""
        tracker = cls("", writer.log_dir)
        tracker.writer = writer
        return tracker

    @property
    def run_id(self) -> str | None:
        return self.run_name or None

    def start(self) -> None:
        if self.writer is not None:
            return
        require("tensorboard", "write TensorBoard event files")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the hyperparameters into the event file and into `hparams.yml` next to it."""
        # YAML has no subclasses of numbers and text, such as float64 of NumPy and enums.
        numbers = {name: python_number(value) for name, value in values.items()}
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in numbers.items()
        }
        # In the run's own folder: by default it makes another one, which is displayed as a second run.
        self.writer.add_hparams(plain, metric_dict={}, run_name=".")
        self.writer.flush()
        write_whole(Path(self.logging_dir, "hparams.yml"), yaml.safe_dump(plain))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, text as text, a dict of numbers as several curves in one chart."""
        numbers, others = split_numbers(values)
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, global_step=step, **kwargs)
        for name, value in others.items():
            if isinstance(value, dict) and not split_numbers(value)[1]:
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                self.writer.add_text(name, str(value), global_step=step, **kwargs)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log `values`, batches of images by name, at update `step`: (count, channels, height, width) unless
        `dataformats` is given.
        """
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)
