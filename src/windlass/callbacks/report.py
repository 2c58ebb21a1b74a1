"""The report of a run: `report.html` during the run, `training.png` at its end."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from windlass.callbacks.picture import draw_training
from windlass.callbacks.report_page import render_report
from windlass.config.sections.setting import default_of
from windlass.core.events import TrainerCallback, TrainerControl, TrainerState
from windlass.core.logs import get_logger
from windlass.core.optional import is_available, is_imported
from windlass.core.redact import is_secret_name, redact_command, redact_value
from windlass.core.whole_file import write_whole

logger = get_logger(__name__)

Facts = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_PACKAGES = ("windlass", "torch", "numpy", "transformers", "peft", "datasets", "tokenizers", "safetensors")


class ReportCallback(TrainerCallback):
    """Writes `report.html` into the output folder at each save and at the end, and `training.png` at the end.

    On the main process only. A page that cannot be written is warned of and does not stop training.

    Args:
        output_dir: the run's folder.
        facts: the contents of the page besides the curves (see `report_page.render_report`), or a function that returns
            them when the page is written. `title`, `status`, `arguments` and `environment` have defaults.
    """

    def __init__(self, output_dir: str | os.PathLike[str], facts: Facts | None = None) -> None:
        self.folder = Path(output_dir).expanduser().absolute()
        self._facts = facts

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write(args, state, f"running, step {state.global_step:,} of {state.max_steps:,}", picture=False)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        status = f"finished after {state.global_step:,} steps"
        if state.global_step < state.max_steps:
            status = f"stopped at step {state.global_step:,} of {state.max_steps:,}"
        self._write(args, state, status, picture=True)

    def _write(self, args: Any, state: TrainerState, status: str, *, picture: bool) -> None:
        if not state.is_world_process_zero:
            return
        try:
            facts = self._collect(args, status)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "report.html", render_report(state.log_history, facts))
            if picture:
                self._draw(state, str(facts["title"]))
        except Exception as error:  # a full disk or a broken matplotlib must not end training
            logger.warning("the report in %s could not be written: %r", self.folder, error)

    def _collect(self, args: Any, status: str) -> dict[str, Any]:
        given = self._facts() if callable(self._facts) else self._facts or {}
        found = {"title": self.folder.name, "status": status}
        facts = {**found, "arguments": changed_arguments(args), "environment": environment(), **given}
        return dict(redact_value("facts", facts))

    def _draw(self, state: TrainerState, title: str) -> None:
        if is_available("matplotlib"):
            draw_training(state.log_history, self.folder / "training.png", title)
        else:
            logger.info(
                "training.png is not written, since matplotlib is not installed; report.html has the curves. Install "
                'it with: pip install "windlass[report]"'
            )


def changed_arguments(args: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults or have none, without secrets.

    Empty for an object that is not a dataclass.
    """
    if not dataclasses.is_dataclass(args):
        return {}
    changed = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        shown = field.init and not field.name.startswith("_") and not is_secret_name(field.name)
        if shown and value != default_of(field):
            changed[field.name] = redact_value(field.name, getattr(value, "value", value))
    return changed


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter to a result, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def environment() -> dict[str, str]:
    """Return versions and devices of this process."""
    return {
        **package_versions(),
        "system": platform.platform(terse=True),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        **_accelerator(),
        "command": " ".join(redact_command(sys.argv)),
    }


def _accelerator() -> dict[str, str]:
    if not is_imported("torch"):
        return {}
    import torch

    if not torch.cuda.is_available():
        return {"accelerator": "none (CPU)"}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"accelerator": ", ".join(names), "cuda": str(torch.version.cuda)}
