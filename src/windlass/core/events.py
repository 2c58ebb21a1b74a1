"""What a callback sees and returns: the state of a run, the control flags, and the names of the sixteen events.

On the ground floor because the engine fires these events and the subscribers in `callbacks/` answer them, and the two
must not know each other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from windlass.core.metric_values import plain_metrics
from windlass.core.whole_file import parse_json, write_whole

EVENTS = (
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin",
    "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_evaluate", "on_predict",
    "on_prediction_step", "on_save", "on_log", "on_push_begin",
)  # fmt: skip


class ExportableState:
    """An object whose state travels in a checkpoint as plain data. Callbacks may inherit it beside `TrainerCallback`.

    `state` must return `{"args": keywords of the constructor, "attributes": what is set after it}`.
    """

    def state(self) -> dict[str, Any]:
        """The state as plain data. Raises NotImplementedError if the class does not define it."""
        raise NotImplementedError(f"{type(self).__name__} must define state() to be saved in checkpoints")

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """A new object with this `state`, which the method of that name returned."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


@dataclass
class TrainerState:
    """The progress of a run. Plain data: saved as `trainer_state.json` in every checkpoint.

    `global_step` counts optimizer updates; `epoch` is fractional. `num_input_tokens_seen` stays 0 unless
    `include_num_input_tokens_seen` asks for it. `best_*` describe the best evaluation so far.
    `stateful_callbacks` may be given as a list of callbacks, whose states are taken.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    # What a resumed run takes from its own process and arguments, never from the checkpoint.
    PER_PROCESS: ClassVar[tuple[str, ...]] = ("is_local_process_zero", "is_world_process_zero")

    def __post_init__(self) -> None:
        if self.log_history is None:  # the default of states in older scripts
            self.log_history = []
        if not isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = _states_of(self.stateful_callbacks or ())

    def compute_steps(self, args: object, max_steps: int) -> None:
        """Set `logging_steps`, `eval_steps` and `save_steps` from `args`, in updates. A number below 1 is a share of
        `max_steps`, the updates of the run; the result is rounded up.
        """
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, name)
            if steps is not None:
                setattr(self, name, math.ceil(max_steps * steps) if steps < 1 else steps)

    def init_training_references(
        self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any = None
    ) -> None:
        """Set the length of a run that begins, and where this process is among the others.

        Args:
            trainer: has `is_local_process_zero()` and `is_world_process_zero()`.
            max_steps: updates of the run.
            num_train_epochs: passes over the data, the last one perhaps incomplete.
            trial: of a search over hyperparameters: a dict, or an object whose `params` is one.
        """
        self.trial_params = None if trial is None else dict(getattr(trial, "params", trial))
        self.max_steps, self.num_train_epochs = max_steps, num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()

    def to_dict(self) -> dict[str, Any]:
        """A deep copy as plain data. Rows that a script added to `log_history` by itself may hold anything."""
        values = dataclasses.asdict(dataclasses.replace(self, log_history=[]))
        return {**values, "log_history": [plain_metrics(row) for row in self.log_history]}

    def save_to_json(self, json_path: str) -> None:
        """Write the file `json_path` as JSON with sorted keys; one that exists is replaced as a whole."""
        write_whole(Path(json_path), json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainerState:
        """Build from `values` by field; keys this version does not know are dropped."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> TrainerState:
        """Read what `save_to_json` or a checkpoint wrote. `json_path` is the file, or the folder that has it under the
        name `trainer_state.json`.

        The older rows of a long `log_history`, which a checkpoint keeps in files of their own, are read too. Raises
        ValueError if some of these rows are missing.
        """
        path = Path(json_path)
        if path.is_dir():
            path /= "trainer_state.json"
        values = parse_json(path.read_bytes(), object_hook=_own_value)
        index = path.with_name("log_history.json")
        if index.exists():
            values["log_history"] = _whole_history(index, values["log_history"])
        return cls.from_dict(values)


def _states_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Class name -> state, or -> list of states of several callbacks of one class."""
    found: dict[str, list[Any]] = {}
    for callback in callbacks:
        if not isinstance(callback, ExportableState):
            raise TypeError(
                f"stateful_callbacks holds a {type(callback).__name__}, which is not an ExportableState; inherit it "
                "and define state()"
            )
        found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _whole_history(index: Path, newest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that `log_history.json` of a checkpoint lists, and the newest ones."""
    listed = parse_json(index.read_bytes())
    texts = [(index.parent / segment["file"]).read_bytes() for segment in listed["segments"]]
    lines = [line for text in texts for line in text.splitlines()]
    rows = [parse_json(line, object_hook=_own_value) for line in lines] + newest
    if len(rows) != listed["rows"]:
        raise ValueError(f"{index} lists {listed['rows']} rows, and {len(rows)} are there")
    return rows


def _own_value(found: dict[str, Any]) -> Any:
    """What a checkpoint writes for a value that JSON lacks, as `checkpoint.codec` says; any other map as it is."""
    match found:
        case {"$float": str(text)}:
            return float(text)
        case {"$tuple": list(items)}:
            return tuple(items)
        case {"$map": list(pairs)}:
            return dict(pairs)
    return found


@dataclass
class TrainerControl(ExportableState):
    """What the loop does next. Callbacks set these; `should_training_stop` alone survives the step."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    # The names under which callbacks written for transformers reset the flags.

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> dict[str, Any]:
        """The flags, as a checkpoint of transformers holds them."""
        return {"args": dataclasses.asdict(self), "attributes": {}}

    def update(self, actions: dict[str, Any]) -> None:
        """Set the flags that a callback returned, `actions` by name. Raises ValueError if a name is not one of the five
        flags.
        """
        for name, value in actions.items():
            if name not in CONTROL_FLAGS:
                known = ", ".join(CONTROL_FLAGS)
                raise ValueError(
                    f"a callback returned {name!r}, which is not a control flag; known flags: {known}"
                )
            setattr(self, name, bool(value))


class RunProgress:
    """The progress of a run, and what it is to do next. Scripts may replace `control`, so it is read each time."""

    state: TrainerState
    control: TrainerControl


CONTROL_FLAGS = tuple(f.name for f in dataclasses.fields(TrainerControl))
