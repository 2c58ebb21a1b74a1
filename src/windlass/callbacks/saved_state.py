"""The states of callbacks in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from windlass.core.logs import get_logger
from windlass.core.types import State

logger = get_logger(__name__)

# Stored with the callbacks, as in checkpoints of transformers, and not restored: a run begins with flags of its own.
CONTROL_ENTRY = "TrainerControl"


def export_states(callbacks: Iterable[Any]) -> State:
    """Return the states of all callbacks that have one.

    Returns:
        class name -> state, or a list of states for several instances of a class. A state is
        `{"args": ..., "attributes": ...}` from `state()`, or `{"state_dict": ...}` from `state_dict()`.
    """
    found: dict[str, list[State]] = {}
    for callback in callbacks:
        exported = _export(callback)
        if exported is not None:
            found.setdefault(type(callback).__name__, []).append(exported)
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def import_states(callbacks: Iterable[Any], stored: Mapping[str, Any], *, restore_args: bool) -> None:
    """Restore states in place, matched by class name, and by order within a class.

    States without a callback, and callbacks without a state, are warned of; the callbacks may differ between runs.

    Args:
        restore_args: also call the constructor with the arguments of the checkpoint. Otherwise the arguments of this
            run stay, and differences are warned of.
    """
    present: dict[str, list[Any]] = {}
    for callback in callbacks:
        if has_state(callback):
            present.setdefault(type(callback).__name__, []).append(callback)
    saved = {
        name: states if isinstance(states, (list, tuple)) else [states]
        for name, states in stored.items()
        if name != CONTROL_ENTRY
    }
    for name, states in saved.items():
        for callback, state in zip(present.get(name, []), states, strict=False):
            _import(callback, state, restore_args)
    lost = {name: len(states) - len(present.get(name, [])) for name, states in saved.items()}
    fresh = {name: len(callbacks) - len(saved.get(name, [])) for name, callbacks in present.items()}
    if names := _listed(lost):
        logger.warning("The checkpoint holds the state of callbacks that this run does not have: %s", names)
    if names := _listed(fresh):
        logger.warning(
            "Callbacks without a state in the checkpoint, which start from their defaults: %s", names
        )


def has_state(callback: Any) -> bool:
    """Return True if checkpoints hold a state of this callback."""
    return _has_state_dict(callback) or _has_attributes(callback)


def _listed(excess: Mapping[str, int]) -> str:
    return ", ".join(name if n == 1 else f"{name} (x{n})" for name, n in excess.items() if n > 0)


def _has_state_dict(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(
        getattr(callback, "load_state_dict", None)
    )


def _has_attributes(callback: Any) -> bool:
    return callable(getattr(callback, "state", None))


def _export(callback: Any) -> State | None:
    if _has_state_dict(callback):
        return {"state_dict": callback.state_dict()}
    if not _has_attributes(callback):
        return None
    state = callback.state()
    if not isinstance(state, Mapping) or not {"args", "attributes"} >= set(state):
        message = "%s.state() returned %s, not {'args': {...}, 'attributes': {...}}: its state is not saved."
        logger.warning(message, type(callback).__name__, type(state).__name__)
        return None
    return {"args": dict(state.get("args", {})), "attributes": dict(state.get("attributes", {}))}


def _import(callback: Any, state: Mapping[str, Any], restore_args: bool) -> None:
    if "state_dict" in state:
        callback.load_state_dict(state["state_dict"])
        return
    args = state.get("args", {})
    if restore_args:
        callback.__init__(**args)  # in place, since the script may hold this instance
    elif _has_attributes(callback):
        for name, now in dict(callback.state().get("args", {})).items():
            if name in args and args[name] != now:
                message = "%s: %s=%r differs from %r in the checkpoint; the value of this run is used."
                logger.warning(message, type(callback).__name__, name, now, args[name])
    for name, value in state.get("attributes", {}).items():
        setattr(callback, name, value)
