"""`TrlParser`: flags, a YAML file of defaults, and environment variables in it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from windlass.compat.parser import HfArgumentParser, places_in
from windlass.config import documents
from windlass.core.script_command import note_flags
from windlass.core.whole_file import read_text

_FLAG = "--config"


class TrlParser(HfArgumentParser):
    """An `HfArgumentParser` that also takes `--config FILE.yaml`, whose values are the defaults of the flags.

    A key `env` of the file holds environment variables to set.

    Raises:
        ValueError: a dataclass has a field named "config".
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        given = [] if dataclass_types is None else dataclass_types
        for dtype in given if isinstance(given, Iterable) else [given]:
            if "config" in dtype.__dataclass_fields__:
                raise ValueError(
                    f"Dataclass {dtype.__name__} has a field named 'config', which is reserved for the path of the "
                    "configuration file; rename it"
                )
        super().__init__(dataclass_types, **kwargs)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Parse a command line, and the file that its `--config` names. Raises ValueError for an unknown key or flag,
        or a file that is not a mapping.

        Args:
            args: its words; `sys.argv[1:]` if not given.
            return_remaining_strings: return what no flag takes as an additional list, instead of raising.
            fail_with_unknown_args: raise for keys of the file that no flag takes.
            separate_remaining_strings: return the remaining words of the file and of the command line as two lists.

        Returns:
            The instances of the dataclasses, as `parse_args_into_dataclasses` returns them.
        """
        if args is None:
            note_flags(self)
        words = list(sys.argv[1:] if args is None else args)
        path, words = _config_file(words)
        values: dict[str, Any] = {}
        if path is not None:
            values, self._defaults_set = _read(path)
        unknown = self.set_defaults_with_config(**values)
        if unknown and fail_with_unknown_args and not return_remaining_strings:
            raise ValueError(
                f"Unknown arguments from config file: {unknown}. Remove them, add them to a dataclass, or set "
                "fail_with_unknown_args=False"
            )
        found = self.parse_args_into_dataclasses(words, return_remaining_strings=return_remaining_strings)
        if not return_remaining_strings:
            return found
        *instances, remaining = found
        if separate_remaining_strings:
            return (*instances, unknown, remaining)
        return (*instances, [*unknown, *remaining])

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Replace the defaults of flags, those of subcommands too; such flags are no longer required.

        Returns:
            The words `--name value` of keys that no flag takes.
        """
        used = _set_defaults(self, kwargs)
        return [word for key, value in kwargs.items() if key not in used for word in (f"--{key}", str(value))]


def _config_file(words: list[str]) -> tuple[Path | None, list[str]]:
    """The path after `--config`, and the other words."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(_FLAG, type=Path)
    found, remaining = finder.parse_known_args(words)
    return found.config, remaining


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a file, without `env`, whose variables are set; and where each value stands."""
    document = documents.loads(read_text(path), str(path))
    values = dict(document.values)
    variables = values.pop("env", {})
    if not isinstance(variables, Mapping):
        raise ValueError(f"{path}: env must be a mapping of names to values")
    for name, value in variables.items():
        os.environ[name] = str(value)
    return values, places_in(document)


def _set_defaults(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> set[str]:
    used: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                used |= _set_defaults(inner, values)
        elif action.dest in values:
            action.default, action.required = values[action.dest], False
            used.add(action.dest)
    return used
