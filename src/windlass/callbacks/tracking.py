"""`report_to`: send the rows of `metrics.jsonl` to experiment trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from windlass.callbacks.rows import Row, RowCallback, measured, revived
from windlass.callbacks.tracker import GeneralTracker, RunFacts, end_reporting, reporting
from windlass.callbacks.tracker_registry import LOGGER_TYPE_TO_CLASS, trackers_of_run
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control
from windlass.core.events import TrainerState
from windlass.core.locations import local_folder
from windlass.core.logs import get_logger
from windlass.core.redact import redact_value, redacted_argv
from windlass.core.types import State

logger = get_logger(__name__)
# Times the duration of a failure: a tracker without a connection takes a tenth of the time at most.
_PAUSE = 10
_OPTIONS = ("trackio_space_id", "trackio_bucket_id")
# The packages have one open run per process, so a run that starts ends that of an earlier Trainer.
_open: dict[str, list[GeneralTracker]] = {}


class TrackingCallback(RowCallback):
    """Sends every row of `metrics.jsonl` to the trackers on the main process, with the same names and numbers.

    Runs are opened when training begins, or with the first metrics before it, and stay open afterwards for later
    evaluations and calls of the script; the packages close them when the process ends. A resumed run continues the run
    of its checkpoint if the tracker can. It is an error if a tracker cannot be started; later failures are warned of
    and do not stop training. A tracker that failed gets nothing for ten times as long as it took to fail.

    Args:
        trackers: names as in `report_to`, or trackers of your own; one or a list.
        clock: returns seconds of a clock that is never set.

    Raises:
        ConfigError: a name is not a tracker, or a variable of the environment asks for more than rows.
        MissingDependencyError: a tracker's package is not installed.
    """

    def __init__(
        self,
        trackers: str | GeneralTracker | Iterable[str | GeneralTracker],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        wanted = [trackers] if isinstance(trackers, str | GeneralTracker) else list(trackers)
        self._wanted = trackers_of_run(wanted)
        self._running: list[GeneralTracker] = []
        self._clock = clock
        # Trackers that the last metrics did not reach, by identity: two may have one name; when each is tried again
        self._unreached: dict[int, float] = {}
        self._has_trained = False
        self._run_ids: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        return [item if isinstance(item, str) else item.name for item in self._wanted]

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers with an open run, on the main process."""
        return list(self._running)

    def on_train_begin(
        self, args: Args, state: TrainerState, control: Control, model: Any = None, **kwargs: Any
    ) -> None:
        if self._has_trained:
            self._running = []  # a second training is another run; opening it ends the first one
        if not state.global_step:
            self._run_ids = {}  # of a checkpoint that an earlier run was resumed from or rolled back to
        self._has_trained = True
        self.setup(args, state, model)

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Open the runs when training begins, and send them the settings. Subclasses of scripts extend it."""
        if state.is_world_process_zero:
            self._ensure_running(args, state)
            self._describe(args, model)

    def take(self, row: Row, args: TrainingArguments, state: TrainerState) -> None:
        self._ensure_running(args, state)
        values = sent_values(row)
        for tracker in self._running:
            if self._clock() >= self._unreached.get(id(tracker), -math.inf):
                self._send(tracker, values, row["step"])

    def _send(self, tracker: GeneralTracker, values: dict[str, Any], step: int) -> None:
        began = self._clock()
        try:
            with reporting(tracker):
                tracker.log(values, step=step)
        except Exception as error:  # a lost connection must not end training
            # Not once for each message: errors of requests hold addresses, and differ each time.
            if id(tracker) not in self._unreached:
                logger.warning("%s received no metrics; training continues: %r", tracker.name, error)
            # Some packages try again for minutes before they raise an error, and training waits.
            now = self._clock()
            self._unreached[id(tracker)] = now + _PAUSE * (now - began)
        else:
            self._unreached.pop(id(tracker), None)

    def _ensure_running(self, args: TrainingArguments, state: TrainerState) -> None:
        if self._running:
            return
        running = []
        for name in self.names:  # before any starts: two of them may have one name
            for earlier in _open.pop(name, ()):
                _finish(earlier)
        for item in self._wanted:
            tracker = item if isinstance(item, GeneralTracker) else self._build(item, args, state)
            with redacted_argv(), reporting(tracker):
                tracker.start()
            _open.setdefault(tracker.name, []).append(tracker)
            running.append(tracker)
        # Not before all have started: after an error in one, the next report must not go to some of them alone.
        self._running, self._run_ids, self._unreached = running, {}, {}

    def _build(self, name: str, args: TrainingArguments, state: TrainerState) -> GeneralTracker:
        facts = RunFacts(
            project=args.project,
            name=state.trial_name or args.run_name,
            folder=local_folder(args.output_path),
            step=state.global_step,
            run_id=self._run_ids.get(name),
            options={option: getattr(args, option) for option in _OPTIONS},
        )
        return LOGGER_TYPE_TO_CLASS[name].of_run(facts)

    def _describe(self, args: TrainingArguments, model: Any) -> None:
        """Store the arguments and, for a model of transformers, its configuration under `model/`."""
        as_dict = getattr(getattr(model, "config", None), "to_dict", dict)
        simple = {
            f"model/{name}": value
            for name, value in as_dict().items()
            if isinstance(value, bool | int | float | str)
        }
        for tracker in self._running:
            with reporting(tracker):
                tracker.store_init_configuration(
                    redact_value("config", {**simple, **args.to_sanitized_dict()})
                )

    # --- resuming

    def state_dict(self) -> State:
        """Return the run id of each tracker by name."""
        found = {tracker.name: tracker.run_id for tracker in self._running}
        return {name: run_id for name, run_id in found.items() if run_id is not None}

    def load_state_dict(self, state: State) -> None:
        """Continue these runs when training begins; a run that is open already is kept."""
        self._run_ids = dict(state)


def _finish(earlier: GeneralTracker) -> None:
    """End the run of an earlier Trainer. A failure is one of that run, and must not keep another one from starting."""
    try:
        end_reporting(earlier)
    except Exception as error:
        logger.warning("the earlier run of %s could not be ended: %r", earlier.name, error)


def sent_values(row: Row) -> dict[str, Any]:
    """Return a row for trackers: without kind, step and clock, and flat except for metrics that are dicts."""
    return {name: revived(value) for name, value in measured(row).items() if name != "step"}
