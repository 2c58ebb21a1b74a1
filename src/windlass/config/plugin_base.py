"""Common parts of the configuration objects of a user-owned loop."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from windlass.config.parallel.from_launcher import OWN_VARIABLE, from_environment
from windlass.config.parallel.settings import Settings
from windlass.config.parallel.table import KEYS, SECTIONS
from windlass.config.sections.setting import rules_in
from windlass.config.values import hints, value_fault
from windlass.core.errors import ConfigError, Problem

Cls = TypeVar("Cls", bound=type)


def launched(family: str) -> dict[str, Any]:
    """What the environment of this process sets of a family of settings, as its launcher exports it: {word: value}.

    Settings that are not built are included: the object that has them refuses them on use. Raises ConfigError if a
    variable cannot be read.
    """
    found: dict[str, Any] = {}
    for key in (key for key in KEYS.values() if key.family == family):
        for variable in key.variables:
            if (raw := os.environ.get(variable, "")) not in ("", "None"):
                try:
                    found[key.words[0]] = key.read(raw)
                except ValueError as error:
                    raise ConfigError(Problem(variable, raw, str(error))) from None
    own = from_environment(os.environ) if OWN_VARIABLE in os.environ else Settings()
    return found | {KEYS[name].words[0]: own[name].value for name in own if KEYS[name].family == family}


class Options:
    """A dataclass of options. Those that `setting` declares are checked on use, not on construction."""

    def objections(self) -> Iterator[Problem]:
        """Problems of these options."""
        types = hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if not field.metadata:
                continue  # a setting, which is checked when it is recorded
            rules, value = rules_in(field), getattr(self, field.name)
            fault = value_fault(value, types[field.name], rules)
            if fault is None and value != field.default:
                fault = rules.refused
            if fault:
                yield Problem(f"{type(self).__name__}.{field.name}", value, fault)


class KwargsHandler(Options):
    """A group of options that can list those which differ from the defaults."""

    def to_dict(self) -> dict[str, Any]:
        """All options, as copies."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from the defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}


def described(section: str = "") -> Callable[[Cls], Cls]:
    """Return a decorator that lists the fields of a dataclass of options in its docstring. `section` of a launch file
    has the settings of fields which `setting` does not declare.
    """
    keys = SECTIONS.get(section, {})

    def describe(cls: Cls) -> Cls:
        lines = []
        for field in dataclasses.fields(cls):
            if text := field.metadata.get("help"):
                lines.append(f"        {field.name}: {text}")
            elif key := keys.get(field.name):
                reason = key.refused or key.idle
                lines.append(f"        {field.name}: {key.doc}{f' It {reason}.' if reason else ''}")
        doc = (cls.__doc__ or "").rstrip()
        heading = [] if "Attributes:" in doc else ["", "    Attributes:"]
        cls.__doc__ = "\n".join([doc, *heading, *lines, "    "])
        return cls

    return describe
