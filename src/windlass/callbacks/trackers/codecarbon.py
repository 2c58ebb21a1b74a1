"""CodeCarbon, which measures the energy that a run takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only


@main_only
class CodeCarbonTracker(PackageTracker):
    """An `EmissionsTracker`: `emissions.csv` has energy and emissions of the machine, from the start of a run on.
    It takes no metrics; each report brings the file up to date, so that a killed run has those up to its last report.

    CodeCarbon asks the network where the machine is, and assumes a place if it gets no answer: see its documentation of
    `country_iso_code` and of `.codecarbon.config`.

    Args:
        run_name: name of the project.
        **kwargs: for `codecarbon.EmissionsTracker`, such as `output_dir`.
    """

    name = "codecarbon"
    handle = "emissions"
    closes = "stop"
    identity = "run_id"
    emissions: Any = None

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """With the file in the output folder. A resumed run adds another row."""
        return cls(facts.project, output_dir=str(facts.folder), experiment_name=facts.name)

    @property
    def run_id(self) -> str | None:
        return None  # what is measured cannot be continued by another process

    def start(self) -> None:
        options = {"log_level": "error", "on_csv_write": "update", **self.init_kwargs}
        Path(options.get("output_dir", ".")).mkdir(parents=True, exist_ok=True)
        self.emissions = self.package.EmissionsTracker(project_name=self.run_name, **options)
        self.emissions.start()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Bring the file up to date."""
        self.emissions.flush()
