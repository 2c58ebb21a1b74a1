"""The list of callbacks, and the dispatch of the sixteen events to them."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeVar

from windlass.callbacks.flow import DefaultFlowCallback
from windlass.callbacks.saved_state import export_states, has_state, import_states
from windlass.callbacks.weight_averaging import SWACallback
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import TrainerCallback
from windlass.core.errors import ConfigError, Problem
from windlass.core.events import CONTROL_FLAGS, EVENTS, TrainerControl, TrainerState
from windlass.core.logs import get_logger
from windlass.core.types import State
from windlass.dist.beacon import CALLBACK, noted

logger = get_logger(__name__)

# The requests that an event fulfils or ends, cleared before its listeners run.
_CLEARED: dict[str, tuple[str, ...]] = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}
# Those of an update, which is reported if it takes long: then it is a callback that does.
_OF_UPDATES = frozenset(event for event in EVENTS if "step" in event) - {"on_prediction_step"}
_FIX = "give a TrainerCallback, its class, or an object with methods such as on_log(args, state, control, **kwargs)"
_SHARED = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_UNNAMED = contextlib.nullcontext()
Listener = Callable[..., Any]
Kind = TypeVar("Kind")


def _module_of(listener: Listener) -> str:
    """Return the module of the class of the callback."""
    owner = getattr(listener, "__self__", None)
    return str(getattr(listener if owner is None else type(owner), "__module__", ""))


def _naming(listener: Listener, event: str) -> contextlib.AbstractContextManager[None]:
    """Within the body reports of a long wait name the callback."""
    return noted(f"{CALLBACK}{type(getattr(listener, '__self__', listener)).__name__}.{event}")


def _follows_run_only(listener: Listener) -> bool:
    """Return True if the callback is only to receive evaluations of the run itself."""
    return bool(getattr(getattr(listener, "__self__", None), "follows_run_only", False))


def _event(name: str, *payload: str) -> Callable[..., TrainerControl]:
    """Return the method `on_*` of the handler; `payload` names the arguments after `control`."""

    def fire(
        self: CallbackHandler,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *values: Any,
        **kwargs: Any,
    ) -> TrainerControl:
        given = dict.fromkeys(payload) | dict(zip(payload, values, strict=bool(values)))
        return self.fire(name, args, state, control, **{**given, **kwargs})

    return fire


class CallbackHandler:
    """Holds the callbacks in order and calls those that listen to an event.

    A callback is any object with at least one of the event methods. The listeners of each event are collected when the
    set of callbacks changes: methods inherited from a base class named `TrainerCallback` (Windlass's or transformers')
    do nothing and are left out, so that an event without listeners costs a dictionary look-up.

    Attributes:
        model, optimizer, lr_scheduler, train_dataloader, eval_dataloader, processing_class: passed to every event by
            name; assign them whenever they change.
        callbacks: the instances, in the order in which they are called.
        heard: the events that have listeners. `listens` also notices that a script edited the list of callbacks.
    """

    def __init__(
        self, callbacks: Iterable[Any], model: Any, processing_class: Any, optimizer: Any, lr_scheduler: Any
    ) -> None:
        self.callbacks: list[Any] = []
        self._shared: dict[str, Any] = {}
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self._listeners: dict[str, tuple[Listener, ...]] = {}
        self._active: list[str] = []
        self.heard: frozenset[str] = frozenset()
        self._known: list[Any] = []
        for callback in callbacks:
            self.add_callback(callback)
        if not any(_is_flow(callback) for callback in self.callbacks):
            logger.warning(
                "There is no DefaultFlowCallback among the callbacks, so nothing requests logs, evaluations, saves or "
                "the end of training. Add one with trainer.add_callback(DefaultFlowCallback). The callbacks are:\n%s",
                self.callback_list,
            )
        self.refresh()

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep the arguments of every event in one dict: collecting them costs more than most events."""
        super().__setattr__(name, value)
        if name in _SHARED:
            self._shared[name] = value
        elif name == "call_event":
            self.heard = frozenset(EVENTS)

    # --- the callbacks

    def add_callback(self, callback: Any) -> None:
        """Append a callback: an instance, or a class that can be built without arguments. Raises ConfigError if it has
        none of the event methods, or its class cannot be built without arguments.
        """
        instance = _build(callback) if isinstance(callback, type) else callback
        _check(instance)
        name = type(instance).__name__
        if any(type(present).__name__ == name for present in self.callbacks):
            message = "Added a second %s; both are called. The callbacks before it are:\n%s"
            logger.warning(message, name, self.callback_list)
        self.callbacks.append(instance)
        self.refresh()

    def pop_callback(self, callback: Any) -> Any | None:
        """Remove and return this instance, else an equal one, or the first of this class; None if there is none."""
        itself = [position for position, present in enumerate(self.callbacks) if present is callback]
        alike = (position for position, present in enumerate(self.callbacks) if _matches(present, callback))
        position = next(chain(itself, alike), None)
        if position is None:
            return None
        removed = self.callbacks.pop(position)
        self.refresh()
        return removed

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback. Raises ValueError for an *instance* that is not among the callbacks; an absent class is
        ignored.
        """
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            present = ", ".join(self.callback_list.split())
            raise ValueError(f"this {type(callback).__name__} is not among the callbacks: {present}")

    @property
    def callback_list(self) -> str:
        """The class names, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        """The callbacks of this class, in the order in which they are called."""
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    # --- the listeners

    def refresh(self) -> None:
        """Collect the listeners. Needed only after a method of a callback was assigned."""
        self._listeners = {event: tuple(_bound(self.callbacks, event)) for event in EVENTS}
        # Windlass's own mark their waits themselves.
        self._named = {
            id(listener)
            for event in _OF_UPDATES
            for listener in self._listeners[event]
            if not _module_of(listener).startswith("windlass.")
        }
        self._known = list(self.callbacks)
        replaced = "call_event" in self.__dict__ or type(self).call_event is not CallbackHandler.call_event
        self.heard = frozenset(e for e in EVENTS if replaced or self._listeners[e])

    def begin_step(self, control: TrainerControl) -> frozenset[str]:
        """Reset the requests of the previous step; return the events that have listeners now."""
        if self.callbacks != self._known:  # scripts also edit the list itself
            self.refresh()
        control.should_log = control.should_evaluate = control.should_save = False
        return self.heard

    def listens(self, event: str) -> bool:
        """Return True if a callback listens to this event."""
        if self.callbacks != self._known:  # scripts also edit the list itself
            self.refresh()
        return event in self.heard

    def listens_outside(self, event: str) -> bool:
        """Return True if a callback that is not one of Windlass listens to this event."""
        if not self.listens(event):
            return False
        listeners = self._listeners[event]
        return not listeners or any(not _module_of(one).startswith("windlass.") for one in listeners)

    # --- the events

    def fire(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call every listener of `event`, in order, with `call_event`; merge what each returns into `control`.

        An event that a listener fires by calling `evaluate` or `log` clears no request and skips callbacks whose
        `follows_run_only` is true: the run's own reports and evaluations stay due.

        A listener may return None, a dict of control flags, or a control object of Windlass or transformers.

        Returns:
            `control`, the same object, changed in place.

        Raises:
            ValueError: `event` is not one of the sixteen.
            Exception: raised by a listener; a note with its name is added.
        """
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}; the events are: {', '.join(EVENTS)}")
        if event == "on_train_begin":
            self.refresh()
        if not self._active:
            for flag in _CLEARED.get(event, ()):
                setattr(control, flag, False)
        self._active.append(event)
        try:
            result = self.call_event(event, args, state, control, **kwargs)
        finally:
            self._active.pop()
        if result is not control and result is not None:
            _merge(control, result)
        return control

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call every listener of `event`. Scripts replace it, to give their callbacks other arguments."""
        if self.callbacks != self._known:
            self.refresh()
        listeners = self._listeners[event]
        if len(self._active) > 1:  # fired by a listener
            listeners = tuple(listener for listener in listeners if not _follows_run_only(listener))
        shared = {**self._shared, **kwargs} if kwargs else self._shared
        for listener in listeners:
            try:
                with _naming(listener, event) if id(listener) in self._named else _UNNAMED:
                    result = listener(args, state, control, **shared)
                if result is not None and result is not control:
                    _merge(control, result)
            except Exception as error:
                error.add_note(f"raised in the callback {getattr(listener, '__qualname__', listener)}")
                raise
        return control

    def enter_resumed_epoch(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Call `on_epoch_begin` of the callbacks without a state in checkpoints. Those with a state go on within the
        epoch: the event might reset what was restored. Flags are not cleared: one may have ended this epoch.
        """
        self.refresh()  # not in `call_event`, which would collect all of them
        new = [one for one in self.callbacks if not has_state(one)]
        self._listeners["on_epoch_begin"] = tuple(_bound(new, "on_epoch_begin"))
        try:
            # Past a `call_event` of the script's, which calls all callbacks.
            CallbackHandler.call_event(self, "on_epoch_begin", args, state, control)
        finally:
            self.refresh()

    on_init_end = _event("on_init_end")
    on_train_begin = _event("on_train_begin")
    on_train_end = _event("on_train_end")
    on_epoch_begin = _event("on_epoch_begin")
    on_epoch_end = _event("on_epoch_end")
    on_step_begin = _event("on_step_begin")
    on_substep_end = _event("on_substep_end")
    on_pre_optimizer_step = _event("on_pre_optimizer_step")
    on_optimizer_step = _event("on_optimizer_step")
    on_step_end = _event("on_step_end")
    on_evaluate = _event("on_evaluate", "metrics")
    on_predict = _event("on_predict", "metrics")
    on_prediction_step = _event("on_prediction_step")
    on_save = _event("on_save")
    on_log = _event("on_log", "logs")
    on_push_begin = _event("on_push_begin")

    # --- the state

    def state_dict(self) -> State:
        """Return the states by class name, as `export_states` does. Averages of sharded weights are gathered, and come
        first: another state that fails on one rank must not leave the others waiting in that exchange.
        """
        return export_states(sorted(self.callbacks, key=lambda one: not isinstance(one, SWACallback)))

    def load_state_dict(self, state: State, *, restore_args: bool = False) -> None:
        """Restore the states in place, as `import_states` does."""
        import_states(self.callbacks, state, restore_args=restore_args)


def _is_flow(callback: Any) -> bool:
    return isinstance(callback, DefaultFlowCallback) or type(callback).__name__ == "DefaultFlowCallback"


def _build(callback: type) -> Any:
    try:
        return callback()
    except TypeError as error:
        fix = f"it cannot be built without arguments ({error}); give an instance instead of the class"
        raise ConfigError(Problem("callbacks", callback.__name__, fix)) from error


def _check(callback: Any) -> None:
    """Refuse an object without event methods, and warn of methods that look like a misspelt event."""
    methods = [name for name in dir(callback) if name.startswith("on_")]
    wrong = [name for name in EVENTS if name in methods and not callable(getattr(callback, name))]
    if wrong:
        raise ConfigError(Problem("callbacks", callback, f"its {wrong[0]} is not a method; {_FIX}"))
    if not any(event in methods for event in EVENTS):
        raise ConfigError(Problem("callbacks", callback, f"it has none of the event methods; {_FIX}"))
    own = [name for name in EVENTS if name in methods and not _is_inherited_no_op(callback, name)]
    narrow = [name for name in own if not _takes_any(getattr(callback, name))]
    if narrow:
        fix = f"its {narrow[0]} takes no **kwargs, and is called with model, logs and others by name: add **kwargs"
        raise ConfigError(Problem("callbacks", callback, fix))
    for name in methods:
        # Comparing takes a millisecond a callback where it is done for all of them.
        near = None if name in EVENTS else difflib.get_close_matches(name, EVENTS, n=1, cutoff=0.88)
        if near:
            message = "%s.%s is not an event and is never called; did you mean %s?"
            logger.warning(message, type(callback).__name__, name, near[0])


def _takes_any(method: Any) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # of a method in C
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _matches(present: Any, wanted: Any) -> bool:
    if not isinstance(wanted, type):
        return bool(present == wanted)
    if isinstance(present, wanted):
        return True
    # Scripts for transformers pass its classes of the built-in callbacks.
    foreign = wanted.__module__.split(".")[0] == "transformers"
    own = type(present).__module__.split(".")[0] == "windlass"
    return foreign and own and type(present).__name__ == wanted.__name__


def _bound(callbacks: Iterable[Any], event: str) -> Iterable[Listener]:
    for callback in callbacks:
        listener = getattr(callback, event, None)
        if listener is not None and not _is_inherited_no_op(callback, event):
            yield listener


def _is_inherited_no_op(callback: Any, event: str) -> bool:
    if event in getattr(callback, "__dict__", ()):
        return False
    owner = next((cls for cls in type(callback).__mro__ if event in cls.__dict__), None)
    if owner is None or owner.__name__ != TrainerCallback.__name__:
        return False
    # A user's class may have this name too.
    return owner.__module__.split(".")[0] in ("windlass", "transformers")


def _merge(control: TrainerControl, result: Any) -> None:
    if isinstance(result, Mapping):
        control.update(dict(result))
    elif all(hasattr(result, flag) for flag in CONTROL_FLAGS):
        control.update({flag: getattr(result, flag) for flag in CONTROL_FLAGS})
    else:
        raise TypeError(
            f"a callback returned {type(result).__name__}; return None, the control object, or a dict of control flags "
            f"({', '.join(CONTROL_FLAGS)})"
        )
