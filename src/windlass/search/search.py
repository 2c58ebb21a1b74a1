"""The loop over the trials of a search: all processes of a job train each trial together."""

from __future__ import annotations

import contextlib
import copy
import html
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windlass.checkpoint.run_lock import FolderInUse, RunLock
from windlass.config.arguments import FREE_TO_DIFFER, TrainingArguments
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.config.values import hints, members
from windlass.core.errors import ConfigError, NonFiniteError, Problem, WindlassError, first_line, refuse
from windlass.core.events import TrainerState
from windlass.core.locations import is_url, unwritable
from windlass.core.logs import get_job_logger
from windlass.core.output import say, table
from windlass.core.redact import redact_text
from windlass.core.whole_file import remove_unfinished, write_whole
from windlass.dist.alike import as_texts
from windlass.dist.gang import Gang
from windlass.search.search_settings import SearchSettings
from windlass.search.study import Record, Study, stored_value
from windlass.search.trial_samplers import Sampler

LOCK_NAME = ".windlass-search.lock"
_WIDTH, _HEIGHT = 300, 260


def trials_in_words(study: Study) -> str:
    """Return a table of all trials; the best are marked."""
    names = list(dict.fromkeys(name for record in study.trials for name in record.params))
    best = {record.number for record in study.best()}
    head = ["trial", "state", *(["objective"] * len(study.directions)), *names]
    rows = [
        head,
        *(_cells(record, names, record.number in best, len(study.directions)) for record in study.trials),
    ]
    return "\n".join(table(rows))


def _cells(record: Record, names: list[str], is_best: bool, objectives: int) -> list[str]:
    values = [short(value) for value in record.values] or ["-"] * objectives
    state = "best" if is_best else f"{record.state} {record.reason}".strip()[:40]
    return [str(record.number), state, *values, *(short(record.params.get(name, "-")) for name in names)]


def short(value: Any) -> str:
    """Return a value with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw_trials(study: Study) -> str | None:
    """Return an SVG of the first objective against each hyperparameter that has numbers; None without any."""
    complete = [record for record in study.trials if record.state == "complete"]
    names = [
        name for name in dict.fromkeys(n for r in complete for n in r.params) if _is_numeric(complete, name)
    ]
    if not names:
        return None
    best = {record.number for record in study.best()}
    panels = [_panel(complete, name, best, place * _WIDTH) for place, name in enumerate(names)]
    width, style = len(names) * _WIDTH, "text{font:12px sans-serif}rect{fill:none;stroke:#999}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}"><style>{style}</style>'
    )
    return "\n".join([head, f'<path fill="#fff" d="M0 0H{width}V{_HEIGHT}H0z"/>', *panels, "</svg>"])


def _panel(records: list[Record], name: str, best: set[int], left: float) -> str:
    """Return the points of one hyperparameter, each with the number of its trial."""
    values = [float(record.params[name]) for record in records]
    is_log = min(values) > 0 and max(values) > 20 * min(values)
    across = _scaled(
        [math.log(value) for value in values] if is_log else values, left + 30, left + _WIDTH - 30
    )
    up = _scaled([record.values[0] for record in records], _HEIGHT - 60, 30)
    points = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{"#d55e00" if record.number in best else "#0072b2"}"/>'
        f'<text x="{x + 6:.1f}" y="{y - 5:.1f}">{record.number}</text>'
        for record, x, y in zip(records, across, up, strict=True)
    ]
    scale = f"{html.escape(name)}{', logarithmic' if is_log else ''}: {short(min(values))} to {short(max(values))}"
    lowest, highest = min(r.values[0] for r in records), max(r.values[0] for r in records)
    frame = f'<rect x="{left + 15}" y="15" width="{_WIDTH - 30}" height="{_HEIGHT - 60}"/>'
    words = [
        f'<text x="{left + 15}" y="{_HEIGHT - 28}">{scale}</text>',
        f'<text x="{left + 15}" y="{_HEIGHT - 10}">objective {short(lowest)} to {short(highest)}</text>',
    ]
    return "\n".join([frame, *points, *words])


def _scaled(values: list[float], first: float, last: float) -> list[float]:
    low, high = min(values), max(values)
    return [
        first + (last - first) * ((value - low) / (high - low) if high > low else 0.5) for value in values
    ]


def _is_numeric(records: list[Record], name: str) -> bool:
    values = [record.params.get(name) for record in records]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


logger = get_job_logger(__name__)


class ChosenTrial:
    """A trial whose values are chosen: what `model_init(trial)` gets, on every process.

    Attributes:
        number: of the trial, from 0.
        name: of its run, and of its folder below that of the search.
        params: hyperparameters by name.
    """

    def __init__(self, number: int, name: str, params: Mapping[str, Any]) -> None:
        self.number, self.name, self.params = number, name, dict(params)

    def suggest(self, name: str, *_: Any, **__: Any) -> Any:
        """The value that was chosen for a name."""
        if name not in self.params:
            raise ConfigError(
                Problem(f"hp_space.{name}", None, "is not in the space: suggest it in hp_space(trial)")
            )
        return self.params[name]

    suggest_float = suggest_int = suggest_categorical = suggest


class TrialWatch(TrainerCallback):
    """Reports the objective of each evaluation of a trial, and ends the trial if it is pruned.

    Args:
        report: takes metrics and their update on the main process; returns True if the trial should end.
        agreed: does work on the main process, and returns its result on all. Collective.

    Attributes:
        pruned: the update at which the trial was ended; None if it was not.
    """

    def __init__(
        self,
        trial: ChosenTrial,
        report: Callable[[dict[str, float], int], bool],
        agreed: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self.pruned: int | None = None
        self._trial, self._report, self._agreed = trial, report, agreed
        self._step, self._metrics = 0, dict[str, float]()

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        state.is_hyper_param_search = True
        state.trial_name, state.trial_params = self._trial.name, dict(self._trial.params)
        # Evaluations before a checkpoint are not repeated, and each of them may have ended the trial: the run makes one
        # update more, evaluates and saves. That of the checkpoint's own update was not judged yet.
        for step, metrics in self._agreed(lambda: _evaluations(state.log_history)).items():
            self._step, self._metrics = step, metrics
            if step < state.global_step:
                self._judge(control)
            if self.pruned is not None:
                break

    def on_evaluate(
        self,
        args: Args,
        state: TrainerState,
        control: Control,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        # Of several evaluation sets each has an event: they are joined, and judged at the next update.
        if state.global_step != self._step:
            self._step, self._metrics = state.global_step, {}
        self._metrics |= metrics or {}

    def on_step_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._judge(control)

    def _judge(self, control: Control) -> None:
        if self._metrics:
            metrics, self._metrics = self._metrics, {}
            # On all processes, of which one that went on alone would wait for the others.
            if self._agreed(lambda: self._report(metrics, self._step)):
                self.pruned = self._step
                control.should_training_stop = True


RunTrial = Callable[[ChosenTrial, TrialWatch], dict[str, float] | None]
"""Trains a trial in the folder of its name, from where an earlier process left it; returns the metrics of its last
evaluation, or None if the user interrupted it."""


class Search:
    """One search.

    Args:
        settings: what to search, and how.
        output_path: of the search: a study in this folder is continued.
        all_ranks: all processes of the job.
        arguments: of every trial, but for those that the space names.

    Raises:
        ConfigError: the folder is a URL.
    """

    def __init__(
        self, settings: SearchSettings, output_path: str, all_ranks: Gang, arguments: Mapping[str, Any]
    ) -> None:
        if is_url(output_path):
            fix = "a search is continued from its study, which is not uploaded: set it to a folder of this machine"
            raise ConfigError(Problem("output_dir", output_path, fix))
        self._settings, self._ranks, self._folder = settings, all_ranks, Path(output_path)
        self._is_main = all_ranks.rank == 0
        facts = {**arguments, **settings.chosen_by(), "number of processes": all_ranks.size}
        self._setup = {
            name: redact_text(text)
            for name, text in as_texts(facts).items()
            if name.split(".")[-1] not in FREE_TO_DIFFER
        }
        self._study: Study | None = None  # these three on the main process
        self._sampler: Sampler | None = None
        self._trial: Any = None

    def run(self, run_trial: RunTrial) -> list[Record]:
        """Run the trials that are missing; return the best: one, or with several objectives all that none surpasses.
        The list is empty if no trial is complete.

        Raises:
            ConfigError: the folder holds another search, or one that is running. DataError: its file is damaged.
        """
        # Of two that run at once, each would write its own trials over those of the other.
        lock = RunLock(self._folder, LOCK_NAME)
        try:
            self._agreed(lambda: self._open(lock))
            for number in range(self._settings.n_trials):
                if not self._run_one(number, run_trial):
                    break
            return [Record(**values) for values in self._agreed(self._finish)]
        finally:
            lock.release()

    def _run_one(self, number: int, run_trial: RunTrial) -> bool:
        """Run a trial unless it is over; return False if no further one is to be run."""
        proposal = self._agreed(lambda: self._propose(number))
        if proposal is None:
            return False
        if proposal["is_over"]:
            return True
        trial = ChosenTrial(number, proposal["name"], proposal["params"])
        watch = TrialWatch(trial, self._report, self._agreed)
        metrics, reason = self._train(run_trial, trial, watch)
        if metrics is None and not reason:
            logger.warning("the search is interrupted in trial %d; start it again to continue", number)
            return False
        # Only now, when all processes have left the trial: one that is killed before is continued.
        self._agreed(lambda: self._end(metrics, reason, watch.pruned))
        return True

    def _train(
        self, run_trial: RunTrial, trial: ChosenTrial, watch: TrialWatch
    ) -> tuple[dict[str, float] | None, str]:
        """Train one trial; return its metrics, and why it failed."""
        if self._is_main:
            say(f"trial {trial.number} ({trial.name}): {_in_words(trial.params)}")
        try:
            return run_trial(trial, watch), ""
        except NonFiniteError as error:
            return None, first_line(error)

    # --- on the main process ------------------------------------------------------------------------------------------

    def _open(self, lock: RunLock) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except FolderInUse as error:
            fix = f"another search is writing to it ({error.holder}): wait for it or end it, or choose another folder"
            raise ConfigError(Problem("output_dir", str(self._folder), fix)) from None
        except OSError as error:
            raise unwritable(str(self._folder), error) from None
        self._study = Study(self._folder, self._settings.directions, self._settings.name, self._setup)
        remove_unfinished(self._study.path)
        self._check_objective(self._study)
        self._warn_of_changes(self._study)
        self._sampler = self._settings.sampler(self._study)
        if over := sum(record.state != "running" for record in self._study.trials):
            logger.warning("%s: continuing a search, of which %d trials are over", self._study.path, over)

    def _check_objective(self, study: Study) -> None:
        """Refuse another objective than that of the trials so far, with which new ones would be compared."""
        for record in study.trials:
            values = self._settings.repeatable_objectives(record.metrics) if record.metrics else record.values
            if values is None:
                said = "compute_objective keeps a state between its calls, which is not that of the trials so far"
                logger.warning("%s: %s; new trials are compared with them all the same", study.path, said)
                return
            if values != record.values:
                fix = (
                    f"makes of the metrics of trial {record.number} another objective than {study.path} has, "
                )
                fix += f"{record.values}: restore it, or set another output_dir"
                raise ConfigError(Problem("compute_objective", values, fix))

    def _warn_of_changes(self, study: Study) -> None:
        """Warn of what trials had in common and new ones have not: they are compared as if only the space differed."""
        setup, searched = self._setup, {name for record in study.trials for name in record.params}
        lines = [
            f"{name}: {setup.get(name)} != {study.setup.get(name)} (of the trials so far)"
            for name in sorted({*setup, *study.setup} - searched)
            if setup.get(name) != study.setup.get(name)
        ]
        if lines:
            logger.warning(
                "%s: new trials differ in more than the space:\n  %s", study.path, "\n  ".join(lines)
            )

    def _propose(self, number: int) -> dict[str, Any] | None:
        study, sampler = self._parts()
        known = study.trials[number] if number < len(study.trials) else None
        self._trial = sampler.ask(number, None if known is None else known.suggested or known.params)
        if self._trial is None:
            if known is not None:
                fix = f"has no such values, which trial {number} in {study.path} has: restore it, or set another "
                raise ConfigError(Problem("hp_space", known.params, f"{fix}output_dir"))
            logger.warning("the grid has %d combinations, and all were tried", number)
            return None
        params = _as_stored(self._settings.values(self._trial))
        if known is None:
            known = Record(number, self._new_name(number), params, suggested=_storable(self._trial.params))
            study.trials.append(known)
            study.save()
        elif params != known.params:
            fix = f"chooses other values for trial {number} than {study.path} has, {known.params}: restore it and the "
            raise ConfigError(Problem("hp_space", params, f"{fix}seed, or set another output_dir"))
        elif known.state != "running":
            sampler.replay(self._trial, known)
        return {"name": known.name, "params": known.params, "is_over": known.state != "running"}

    def _new_name(self, number: int) -> str:
        """The name of the present trial, which no other one has: in its folder it would continue that trial."""
        study, _ = self._parts()
        name = _folder_name(
            self._settings.hp_name(self._trial) if self._settings.hp_name else f"run-{number}"
        )
        other = next((record.number for record in study.trials if record.name == name), None)
        if other is not None:
            fix = f"is the name of trial {other} too, and trial {number} needs another folder: use trial.number in it"
            raise ConfigError(Problem("hp_name", name, fix))
        return name

    def _report(self, metrics: dict[str, float], step: int) -> bool:
        study, sampler = self._parts()
        values = self._settings.objectives(metrics)
        if len(values) > 1 or not math.isfinite(values[0]):
            return False
        reports = study.trials[self._trial.number].reports
        # A resumed trial reports again what it reported after its checkpoint: it was not pruned there, or it was killed
        # before that was written.
        reports[step] = values[0]
        study.save()
        return sampler.report(self._trial, reports, step)

    def _end(self, metrics: dict[str, float] | None, reason: str, pruned: int | None) -> None:
        study, sampler = self._parts()
        record = study.trials[self._trial.number]
        values = [] if metrics is None else self._settings.objectives(metrics)
        if metrics is not None and not all(map(math.isfinite, values)):
            reason = f"the objective is {values}"
        if reason:
            record.state, record.reason = "failed", reason
            logger.warning("trial %d failed: %s", record.number, reason)
        elif pruned is not None:
            record.state, record.reason = "pruned", f"at update {pruned}"
        else:
            record.state, record.values = "complete", values
            record.metrics = dict(metrics or {}) if all(map(_is_finite, (metrics or {}).values())) else {}
        study.save()
        sampler.tell(self._trial, record)

    def _finish(self) -> list[dict[str, Any]]:
        study, _ = self._parts()
        say(trials_in_words(study))
        if (picture := draw_trials(study)) is not None:
            try:
                write_whole(study.path.with_suffix(".svg"), picture)
            except OSError as error:  # the trials may have taken days, and the best of them are in the study
                logger.warning("the picture of the trials was not written: %s", error)
        return [vars(record) for record in study.best()]

    def _parts(self) -> tuple[Study, Sampler]:
        assert self._study is not None
        assert self._sampler is not None
        return self._study, self._sampler

    def _agreed(self, work: Callable[[], Any]) -> Any:
        """Do work on the main process, and return its result on all; an error is raised on all."""
        failure: BaseException | None = None
        result: Any = None
        if self._is_main:
            try:
                result = work()
            except Exception as error:
                failure = error
        # Sent also after an error, because the others wait for it.
        message = self._ranks.broadcast_object({"result": result, "error": failure and f"{failure}"})
        if failure is not None:
            raise failure
        if message["error"] is not None:
            raise WindlassError(f"the search failed on the main process: {message['error']}")
        return message["result"]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _folder_name(name: Any) -> str:
    text = str(name)
    if not text or text in (".", "..") or any(sign in text for sign in "/\\\0"):
        raise ConfigError(Problem("hp_name", name, "must return a name for a folder, without slashes"))
    return text


def _as_stored(params: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as the file of the study returns them. Raises ConfigError for a value that it cannot hold."""
    stored = {}
    for name, value in params.items():
        try:
            stored[name] = stored_value(value)
        except (TypeError, ValueError):
            fix = (
                "cannot be written to the file of the search: choose among numbers, words, and lists of these"
            )
            raise ConfigError(Problem(f"hp_space.{name}", value, fix)) from None
    return stored


def _storable(suggested: Mapping[str, Any]) -> dict[str, Any]:
    """What was suggested, without values that only the space itself uses and no file can hold."""
    stored = {}
    for name, value in suggested.items():
        with contextlib.suppress(TypeError, ValueError):
            stored[name] = stored_value(value)
    return stored


def _in_words(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {short(value)}" for name, value in params.items())


def last_evaluation(log_history: list[dict[str, Any]]) -> tuple[int, dict[str, float]]:
    """Return the update of the last evaluation and its metrics of all evaluation sets: 0 and none if there was none."""
    return [(0, {}), *_evaluations(log_history).items()][-1]


def _evaluations(log_history: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return update -> metrics of all evaluation sets."""
    found: dict[int, dict[str, float]] = {}
    for row in log_history:
        if any(name.startswith("eval_") for name in row):
            found.setdefault(row["step"], {}).update((n, value) for n, value in row.items() if n != "step")
    return found


def arguments_of(trial: ChosenTrial, args: TrainingArguments, takes_trial: bool) -> TrainingArguments:
    """Return a copy of the arguments with the values of a trial, and its folder.

    Args:
        takes_trial: `model_init` takes the trial, and may use names that are not arguments.

    Raises:
        ConfigError: a name is not an argument.
    """
    refuse(
        Problem(f"hp_space.{name}", value, "is not an argument of this run, and model_init takes no trial")
        for name, value in trial.params.items()
        if not hasattr(args, name) and not takes_trial
    )
    copied = copy.copy(args)
    copied.output_dir = str(Path(args.output_path) / trial.name)
    types = hints(type(args))
    for name, value in trial.params.items():
        if hasattr(args, name):
            setattr(copied, name, _of_type(value, types.get(name, type(getattr(args, name)))))
    return copied


def _of_type(value: Any, hint: Any) -> Any:
    """Return a number as a field of this type has it: spaces may draw whole numbers as floats, which are cut."""
    kinds = [kind for kind in (int, float) if kind in members(hint)]
    if isinstance(value, bool) or not isinstance(value, int | float) or len(kinds) != 1:
        return value
    return kinds[0](value)
