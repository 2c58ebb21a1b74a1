"""Every public name resolves from the top and has a docstring; of methods, `tests/docs/test_reference.py` holds it."""

from __future__ import annotations

import inspect

import pytest

import windlass

NAMES = sorted(windlass.__all__)


def test_names_are_listed_once() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert {"Trainer", "TrainingArguments", "TrainerCallback", "LossTerms", "EarlyStoppingCallback"} <= set(
        NAMES
    )
    assert set(NAMES) <= set(dir(windlass))


@pytest.mark.parametrize("name", NAMES)
def test_public_name_resolves_and_is_documented(name: str) -> None:
    thing = getattr(windlass, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert thing.__module__.startswith("windlass."), f"{name} comes from {thing.__module__}"
        own = thing.__doc__ if not inspect.isclass(thing) else vars(thing).get("__doc__")
        assert (own or "").strip(), f"{name} has no docstring"
        # A dataclass without a docstring is given its signature as one: that says nothing.
        assert not own.startswith(f"{name}("), f"{name} has only the docstring that dataclass made up"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="TrainerX"):
        windlass.TrainerX  # noqa: B018
