"""Every public name resolves from the top, has a docstring, and no private one slips out."""

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


@pytest.mark.parametrize("name", [n for n in NAMES if inspect.isclass(getattr(windlass, n, None))])
def test_public_methods_are_documented(name: str) -> None:
    thing = getattr(windlass, name)
    bare = [
        attribute
        for attribute, value in vars(thing).items()
        if inspect.isfunction(value) and not attribute.startswith("_") and not inspect.getdoc(value)
        and not _says_it_all(thing, attribute)
    ]  # fmt: skip
    assert not bare, f"{name}: {bare}"


def _says_it_all(owner: type, attribute: str) -> bool:
    """Events, the pair of `Stateful` and the entry points of collators are documented where they are defined."""
    known = ("state_dict", "load_state_dict", "to_dict", "from_dict", "state", "torch_call", "numpy_call")
    return attribute.startswith("on_") or attribute in known


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="TrainerX"):
        windlass.TrainerX  # noqa: B018
