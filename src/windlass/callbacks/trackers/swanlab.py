"""SwanLab."""

from __future__ import annotations

from typing import Any

from windlass.callbacks.tracker import PackageTracker, main_only, split_numbers


@main_only
class SwanLabTracker(PackageTracker):
    """A run of SwanLab; one that the script has opened is used as it is, and left open. `$SWANLAB_MODE` sets the
    connection.

    The arguments are those of `PackageTracker`, for `swanlab.init`.
    """

    name = "swanlab"
    project_variable = "SWANLAB_PROJECT"
    run: Any = None

    def start(self) -> None:
        opened = self.package.get_run() if self.package.has_run() else None
        self.is_ours = opened is None
        self.run = opened or self.package.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and SwanLab's own objects as they are, and text as text."""
        numbers, others = split_numbers(values)
        text = self.package.Text
        texts = {name: text(value) if isinstance(value, str) else value for name, value in others.items()}
        self.run.log({**numbers, **texts}, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log `values`, lists of images (arrays, tensors or PIL images) by name, at update `step`."""
        for name, images in values.items():
            self.log({name: [self.package.Image(image) for image in images]}, step=step, **kwargs)
