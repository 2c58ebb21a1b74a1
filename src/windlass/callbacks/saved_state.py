"""The state of callbacks in a checkpoint: by class name, several instances of one class in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from windlass.core.logs import get_logger
from windlass.core.types import State

logger = get_logger(__name__)

# Stored beside the callbacks by checkpoints of transformers; the control flags are not a callback's.
_NOT_CALLBACKS = ("TrainerControl",)


def export_states(callbacks: Iterable[Any]) -> State:
    """The states of all callbacks that have one.

    Returns:
        class name -> state, or -> list of states where several instances of a class are present. A state is
        `{"args": ..., "attributes": ...}` from a callback's `state()`, or `{"state_dict": ...}` from its
        `state_dict()`.
    """
    found: dict[str, list[State]] = {}
    for callback in callbacks:
        exported = _export(callback)
        if exported is not None:
            found.setdefault(type(callback).__name__, []).append(exported)
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def import_states(callbacks: Iterable[Any], stored: Mapping[str, Any], *, restore_args: bool) -> None:
    """Give stored states back, in place: matched by class name, and by order within a class.

    States without a callback, and callbacks without a state, are named in one warning each; neither is an
    error, because the set of callbacks may change between runs.

    Args:
        restore_args: also build the callback anew with the constructor arguments of the checkpoint. Otherwise
            the arguments of this run stay, and each that differs is named.
    """
    present: dict[str, list[Any]] = {}
    for callback in callbacks:
        if _has_state(callback):
            present.setdefault(type(callback).__name__, []).append(callback)
    saved = {
        name: states if isinstance(states, (list, tuple)) else [states]
        for name, states in stored.items()
        if name not in _NOT_CALLBACKS
    }
    for name, states in saved.items():
        for callback, state in zip(present.get(name, []), states, strict=False):
            _import(callback, state, restore_args)
    _warn_of_leftovers(present, saved)


def _warn_of_leftovers(present: Mapping[str, list[Any]], saved: Mapping[str, Any]) -> None:
    lost = {name: len(states) - len(present.get(name, [])) for name, states in saved.items()}
    fresh = {name: len(callbacks) - len(saved.get(name, [])) for name, callbacks in present.items()}
    if names := _listed(lost):
        logger.warning("The checkpoint holds the state of callbacks that this run does not have: %s", names)
    if names := _listed(fresh):
        logger.warning(
            "Callbacks that start fresh, because the checkpoint holds no state for them: %s", names
        )


def _listed(excess: Mapping[str, int]) -> str:
    return ", ".join(name if n == 1 else f"{name} (x{n})" for name, n in excess.items() if n > 0)


def _is_stateful(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(
        getattr(callback, "load_state_dict", None)
    )


def _has_state(callback: Any) -> bool:
    return _is_stateful(callback) or callable(getattr(callback, "state", None))


def _export(callback: Any) -> State | None:
    if _is_stateful(callback):
        return {"state_dict": callback.state_dict()}
    if not _has_state(callback):
        return None
    state = callback.state()
    if not isinstance(state, Mapping) or not {"args", "attributes"} >= set(state):
        logger.warning(
            "%s.state() returned %s, not {'args': {...}, 'attributes': {...}}: its state is not saved.",
            type(callback).__name__,
            type(state).__name__,
        )
        return None
    return {"args": dict(state.get("args", {})), "attributes": dict(state.get("attributes", {}))}


def _import(callback: Any, state: Mapping[str, Any], restore_args: bool) -> None:
    if "state_dict" in state:
        callback.load_state_dict(state["state_dict"])
        return
    args = state.get("args", {})
    if restore_args:
        # In place, not a new object: the script may hold this instance.
        callback.__init__(**args)
    else:
        _name_changed_args(callback, args)
    for name, value in state.get("attributes", {}).items():
        setattr(callback, name, value)


def _name_changed_args(callback: Any, stored: Mapping[str, Any]) -> None:
    if not callable(getattr(callback, "state", None)):
        return
    for name, now in dict(callback.state().get("args", {})).items():
        if name in stored and stored[name] != now:
            logger.warning(
                "%s: %s: %r (now) != %r (in the checkpoint); the value of this run counts.",
                type(callback).__name__,
                name,
                now,
                stored[name],
            )
