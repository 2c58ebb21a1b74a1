"""MLflow."""

from __future__ import annotations

import json
import os
from typing import Any, Self

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only, numbers_alone
from windlass.core.errors import ConfigError, Problem, first_line
from windlass.core.logs import get_logger, warn_once
from windlass.core.optional import require

logger = get_logger(__name__)
_PURPOSE = "report to MLflow"
_INVALID = "INVALID_PARAMETER_VALUE"
_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@main_only
class MLflowTracker(PackageTracker):
    """A run of MLflow, at `$MLFLOW_TRACKING_URI`; one that the script has opened is used as it is, and left open.

    The variables `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS` (JSON) and `MLFLOW_NESTED_RUN` override the
    arguments.

    Args:
        experiment_name: the experiment that the run belongs to; created if missing.
        logging_dir: folder of the artifacts of a new experiment.
        run_id: continue this run.
        tags: names to texts, or JSON of them.
        nested_run: make it a child of the run that is open.
        run_name, description: of a new run.

    Raises:
        ConfigError: a variable cannot be read.
    """

    name = "mlflow"
    handle = "active_run"
    identity = "info.run_id"
    active_run: Any = None

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = None if logging_dir is None else os.fspath(logging_dir)
        self.continued = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = _tags(os.environ.get("MLFLOW_TAGS", tags))
        self.nested_run = _bool(os.environ.get("MLFLOW_NESTED_RUN", nested_run))
        self.description = description
        self._refused: set[str] = set()

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In the experiment named as the project; a resumed run is continued."""
        return cls(facts.project, run_id=facts.run_id, run_name=facts.name)

    def start(self) -> None:
        # MLflow has one active run in a thread, and `start_run` raises an error beside it unless it is nested.
        opened = self.package.active_run()
        if opened is not None and not self.nested_run and self.continued in (None, opened.info.run_id):
            self.active_run, self.is_ours = opened, False
            return
        self.active_run = self.package.start_run(
            run_id=self.continued,
            experiment_id=self._experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment(self) -> str | None:
        """Return the experiment's number; None, MLflow's default experiment, if it has no name."""
        if self.experiment_name is None:
            return None
        present = self.package.get_experiment_by_name(self.experiment_name)
        if present is not None:
            return str(present.experiment_id)
        made = self.package.create_experiment(self.experiment_name, artifact_location=self.logging_dir)
        return str(made)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log as parameters, and warn of those that are too long for MLflow or differ in a continued run."""
        limits = require("mlflow.utils.validation", _PURPOSE)
        # For another value of a parameter, which a resumed run may have, MLflow refuses the whole batch.
        present = self.package.get_run(self.run_id).data.params
        kept = []
        for name, value in values.items():
            if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH:
                warn_once(logger, f"the parameter {name!r} is too long for MLflow and is not sent to it")
            elif present.get(name, str(value)) != str(value):
                warn_once(logger, f"MLflow keeps the first value of the parameter {name!r}: {present[name]}")
            else:
                kept.append((name, value))
        # A server refuses a longer batch.
        size = limits.MAX_PARAMS_TAGS_PER_BATCH
        for start in range(0, len(kept), size):
            self.package.log_params(dict(kept[start : start + size]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, and warn of other values, and of names that MLflow does not take, once each."""
        given = {n: v for n, v in numbers_alone("MLflow", values).items() if n not in self._refused}
        try:
            self.package.log_metrics(given, step=step, **kwargs)
        except self.package.MlflowException as error:
            if error.error_code != _INVALID:
                raise
            # For one such name, as recall@5, MLflow refuses all that is logged with it.
            for name, value in given.items():
                self._log_one(name, value, step, **kwargs)

    def _log_one(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        try:
            self.package.log_metrics({name: value}, step=step, **kwargs)
        except self.package.MlflowException as error:
            if error.error_code != _INVALID:
                raise
            self._refused.add(name)
            logger.warning("MLflow does not take %r, which is not sent to it: %s", name, first_line(error))

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure of matplotlib or plotly as the artifact `artifact_file`."""
        self.package.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log all files of a folder, `local_dir`, into the folder `artifact_path` of the run (None: its root)."""
        self.package.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log one file, `local_path`, into the folder `artifact_path` of the run (None: its root)."""
        self.package.log_artifact(local_path=local_path, artifact_path=artifact_path)

    def finish(self) -> None:
        if self.is_ours:
            self.package.end_run()


def _tags(tags: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(tags, str):
        return tags
    try:
        read = json.loads(tags)
    except json.JSONDecodeError:
        read = None
    if not isinstance(read, dict):
        raise ConfigError(Problem("MLFLOW_TAGS", tags, 'give a JSON object, such as {"team": "vision"}'))
    return read


def _bool(value: bool | str | None) -> bool:
    if not isinstance(value, str):
        return bool(value)
    if value.lower() not in _BOOLS:
        raise ConfigError(Problem("MLFLOW_NESTED_RUN", value, "give true or false"))
    return _BOOLS[value.lower()]
