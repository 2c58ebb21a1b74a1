"""Aim: a repository of runs in a folder."""

from __future__ import annotations

import os
from typing import Any, Self

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only, split_numbers


@main_only
class AimTracker(PackageTracker):
    """A run in an Aim repository.

    Args:
        run_name: the run's name.
        logging_dir: the folder that holds the repository (`.aim`).
        **kwargs: for `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True
    handle = "writer"
    closes = "close"
    identity = "hash"
    writer: Any = None

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = str(logging_dir)

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In the repository of the output folder, an experiment of the project; a resumed run is continued."""
        name = facts.name or facts.folder.name
        return cls(name, facts.folder, run_hash=facts.run_id, experiment=facts.project)

    def start(self) -> None:
        # Aim does not create the folder itself.
        os.makedirs(self.aim_repo_path, exist_ok=True)
        self.writer = self.package.Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and Aim's own objects as they are, the rest as text."""
        numbers, others = split_numbers(values)
        text = self.package.Text
        texts = {
            name: value if type(value).__module__.split(".")[0] == "aim" else text(str(value))
            for name, value in others.items()
        }
        for name, value in {**numbers, **texts}.items():
            self.writer.track(value, name=name, step=step, **kwargs)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log `values`, images or pairs of image and caption by name, at update `step`. `kwargs`: options for
        `aim.Image` under "aim_image", and for `Run.track` under "track".
        """
        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = self.package.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(shown, name=name, step=step, **options.get("track", {}))
