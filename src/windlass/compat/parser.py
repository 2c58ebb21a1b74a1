"""Command lines, JSON and YAML files into dataclasses: the parser that training scripts use."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from windlass.config import documents
from windlass.config.accepting import OLD_NAMES, AcceptsOldNames
from windlass.config.arguments import TrainingArguments, note_sources
from windlass.config.kinds import flag, from_text
from windlass.config.sections.setting import default_of, flag_options
from windlass.config.values import members
from windlass.core.errors import did_you_mean
from windlass.core.script_command import note_flags
from windlass.core.whole_file import read_text


def string_to_bool(text: str | bool) -> bool:
    """Read yes/no, true/false, on/off, t/f, y/n, 1/0 in any case. Raises ArgumentTypeError for anything else."""
    try:
        return flag(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a truth value; use true or false") from None


def make_choice_type_function(choices: Sequence[Any]) -> Callable[[str], Any]:
    """Return a function from the text of a choice to the choice; it returns any other text unchanged."""
    by_text = {str(choice): choice for choice in choices}
    return lambda text: by_text.get(text, text)


def _bool_or_text(text: str) -> bool | str:
    """Read a field of bool or text: only `true` and `false` are bools, so that a path named `1` stays a path."""
    return text.lower() == "true" if text.lower() in ("true", "false") else text


def _number_or_text(kind: type[int | float], text: str) -> float | str:
    try:
        return kind(text)
    except ValueError:
        return text


class _OneOrMany(argparse.Action):
    """One word stays a word; several become a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def add_field(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    """Add the flags of one dataclass field: `--name`, `--na-me`, aliases, and `--no_name` for a bool that is True."""
    metadata = flag_options(field)
    aliases = metadata.pop("aliases", [])
    aliases = [aliases] if isinstance(aliases, str) else aliases
    names = list(dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"]))
    kwargs = {**metadata, **_conversion(field, hint), **_default(field, hint)}
    group.add_argument(*names, *aliases, **kwargs)
    if default_of(field) is True and _is_bool(hint):
        negated = list(dict.fromkeys([f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"]))
        # After the flag itself: of two actions with one destination the first sets the default.
        extra = {key: value for key, value in metadata.items() if key == "help"}
        group.add_argument(*negated, action="store_false", dest=field.name, default=False, **extra)


def _is_bool(hint: Any) -> bool:
    return set(members(hint)) - {type(None)} == {bool}


def _default(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    if (default := default_of(field)) is not dataclasses.MISSING:
        return {"default": default}
    return {"default": False if hint is bool else None} if _is_bool(hint) else {"required": True}


def _conversion(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """The `type`, `nargs`, `choices` of a flag, from the type of its field. Raises ValueError for a union of types that
    one flag cannot distinguish.
    """
    kinds = [kind for kind in members(hint) if kind is not type(None)]
    if _is_bool(hint):
        return _bool_flag(field, hint)
    words = [kind for kind in kinds if kind is not str]
    # An enum may have text beside it, whose words are still the only ones.
    alone = words if len(words) == 1 and get_origin(words[0]) is not Literal else kinds
    if len(alone) == 1 and (choices := _choices(alone[0])) is not None:
        return {"choices": choices, "type": make_choice_type_function(choices)}
    lists = [kind for kind in kinds if get_origin(kind) is list or kind is list]
    if lists:
        if str in kinds:
            return {"nargs": "+", "type": str, "action": _OneOrMany}
        return {"nargs": "+", "type": (get_args(lists[0]) or (str,))[0]}
    if bool in kinds and str in kinds:
        return {"type": _bool_or_text, "nargs": "?", "const": True}
    if str in kinds and words in ([int], [float]) and type(None) not in members(hint):
        # transformers reads such a field as a number alone; scripts compute with it.
        return {"type": functools.partial(_number_or_text, words[0])}
    if str in kinds or Any in kinds:
        return {"type": str}
    if len(kinds) != 1:
        raise ValueError(
            f"field {field.name!r}: a flag has one type, Optional[X] or a union with str, and not {hint}"
        )
    return {"type": _or_none(kinds[0]) if type(None) in members(hint) else kinds[0]}


def _or_none(kind: Any) -> Callable[[str], Any]:
    """`kind`, which reads "none" and "null" as None."""

    @functools.wraps(kind, updated=())  # argparse names it in errors
    def parse(text: str) -> Any:
        return None if text.lower() in ("none", "null") else kind(text)

    return parse


def _bool_flag(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    if hint is bool or default_of(field) not in (None, dataclasses.MISSING):
        return {"type": string_to_bool, "nargs": "?", "const": True}
    return {"type": string_to_bool}


def _choices(kind: Any) -> Sequence[Any] | None:
    if get_origin(kind) is Literal:
        return get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.value for member in kind]
    return None


__all__ = ["HfArg", "HfArgumentParser", "string_to_bool"]


def HfArg(  # noqa: N802 (scripts know it by this name)
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Callable[[], Any] | Any = dataclasses.MISSING,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A dataclass field with further flags (`aliases=["-e"]`) and a help text for the command line."""
    info = dict(metadata or {})
    if aliases is not None:
        info["aliases"] = aliases
    if help is not None:
        info["help"] = help
    return dataclasses.field(metadata=info, default=default, default_factory=default_factory, **kwargs)


class HfArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes its flags from dataclasses and returns their instances.

    Each field becomes `--name` (and `--na-me`). A bool that defaults to True also gets `--no_name`. Flags added by
    hand are returned in an additional namespace. `TrainingArguments` also takes the flags of its old names.

    Args:
        dataclass_types: one dataclass, or several; the flags of all share one command line.
        kwargs: as for `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(**kwargs)
        if dataclass_types is None:
            dataclass_types = []
        elif dataclasses.is_dataclass(dataclass_types) or not isinstance(dataclass_types, Iterable):
            dataclass_types = [dataclass_types]
        self.dataclass_types: list[Any] = list(dataclass_types)
        self._defaults_set: dict[str, str] = {}  # name -> the file that replaced its default
        for dtype in self.dataclass_types:
            self._add_dataclass(dtype)
        for dtype in self.dataclass_types:
            if isinstance(dtype, AcceptsOldNames):
                self._add_old_names()
                break

    def _add_dataclass(self, dtype: Any) -> None:
        group_name = getattr(dtype, "_argument_group_name", None)
        group = self.add_argument_group(group_name) if group_name else self
        for field, hint in _typed_fields(dtype):
            add_field(group, field, hint)

    def _add_old_names(self) -> None:
        """Flags of old names, unless a script declares the name itself. They are left out of `--help`."""
        for name, old in OLD_NAMES.items():
            flags = [
                f
                for f in (f"--{name}", f"--{name.replace('_', '-')}")
                if f not in self._option_string_actions
            ]
            if f"--{name}" not in flags:
                continue
            kwargs: dict[str, Any] = {"type": old.kind}
            if old.kind is bool:
                kwargs = {"type": string_to_bool, "nargs": "?", "const": True}
            self.add_argument(
                *dict.fromkeys(flags), dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs
            )

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Parse a command line.

        Args:
            args: its words; `sys.argv[1:]` if not given.
            return_remaining_strings: return words that no flag takes as an additional list, instead of raising.
            look_for_args_file: read more words from the file beside the script that ends in `.args`, if there is one.
            args_filename: read them from this file instead.
            args_file_flag: a flag that names files of words; may be given several times, later ones win.

        Returns:
            The instances in the order of the dataclasses; a namespace if there are other flags; the remaining words
            if asked for.

        Raises:
            ValueError: words that no flag takes.
            OSError: a file of words that was asked for cannot be read.
            ConfigError: a dataclass refused its values.
        """
        if args is None:  # the command of this process, which the end of a run prints to resume it
            note_flags(self)
        words = list(sys.argv[1:] if args is None else args)
        files, words = _args_files(words, look_for_args_file, args_filename, args_file_flag)
        # The command line is after the files, because the last value of a flag counts.
        read = [(str(path), read_text(path).split()) for path in files]
        read.append(("the command line", words))
        namespace, remaining = self.parse_known_args([word for _, some in read for word in some])
        given = {**self._defaults_set, **{name: place for place, some in read for name in self._given(some)}}
        outputs = self._instances(namespace, given)
        if vars(namespace):
            outputs.append(namespace)
        if return_remaining_strings:
            return (*outputs, remaining)
        if remaining:
            hints = "".join(
                did_you_mean(w, self._option_string_actions) for w in remaining if w.startswith("--")
            )
            raise ValueError(f"no argument takes these words of the command line: {remaining}{hints}")
        return tuple(outputs)

    def _given(self, words: Sequence[str]) -> set[str]:
        """Names of the arguments whose flags are among the words; a flag may be abbreviated."""
        actions = self._option_string_actions
        found = set()
        for given in (word.partition("=")[0] for word in words):
            meant = [given] if given in actions else [one for one in actions if one.startswith(given)]
            names = {actions[one].dest for one in meant}
            if len(names) == 1 and (given in actions or given.startswith("--")):
                found |= names
        return found

    def _instances(self, namespace: argparse.Namespace, given: Mapping[str, str]) -> list[Any]:
        """Build each dataclass and take its values out of the namespace.

        A default is only passed on if it was set, so that the dataclass knows what was requested.

        Args:
            given: where each argument was set.
        """
        found = vars(namespace)
        old = {
            name: found.pop(name) for name in list(found) if name in OLD_NAMES and not self._declared(name)
        }
        inputs = []
        for dtype in self.dataclass_types:
            fields = [f for f in dataclasses.fields(dtype) if f.init]
            inputs.append({f.name: found[f.name] for f in fields if _passed_on(f, found[f.name], given)})
        for dtype in self.dataclass_types:
            for field in dataclasses.fields(dtype):
                found.pop(field.name, None)
        outputs = []
        for dtype, values in zip(self.dataclass_types, inputs, strict=True):
            takes_old = isinstance(dtype, AcceptsOldNames)
            outputs.append(_noted(dtype(**values, **(old if takes_old else {})), given))
        return outputs

    def _declared(self, name: str) -> bool:
        return any(name in dtype.__dataclass_fields__ for dtype in self.dataclass_types)

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Return the dataclasses, filled from a mapping.

        Args:
            args: field -> value, for all dataclasses together; text is converted for fields that are numbers or bools.
            allow_extra_keys: ignore keys that no dataclass takes, which are a ValueError otherwise.
        """
        return self._filled(args, allow_extra_keys, {})

    def _filled(
        self, args: Mapping[str, Any], allow_extra_keys: bool, sources: Mapping[str, str]
    ) -> tuple[Any, ...]:
        used: set[str] = set()
        outputs = []
        for dtype in self.dataclass_types:
            keys = {f.name for f in dataclasses.fields(dtype) if f.init}
            if isinstance(dtype, AcceptsOldNames):
                keys |= {name for name in OLD_NAMES if not self._declared(name)}
            inputs = {name: value for name, value in args.items() if name in keys}
            used |= set(inputs)
            outputs.append(_noted(dtype(**_converted(dtype, inputs)), sources))
        unused = sorted(set(args) - used)
        if unused and not allow_extra_keys:
            known = [f.name for dtype in self.dataclass_types for f in dataclasses.fields(dtype)]
            hints = "".join(did_you_mean(name, known) for name in unused)
            raise ValueError(f"no argument takes these keys: {unused}{hints}")
        return tuple(outputs)

    def parse_json_file(
        self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False
    ) -> tuple[Any, ...]:
        """`parse_dict` of the object in `json_file`; `allow_extra_keys` as there."""
        text = read_text(Path(json_file))
        found = documents.loads(text, str(json_file), json_text=True)
        return self._filled(found.values, allow_extra_keys, places_in(found))

    def parse_yaml_file(
        self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False
    ) -> tuple[Any, ...]:
        """`parse_dict` of the mapping in `yaml_file`; `allow_extra_keys` as there."""
        found = documents.loads(read_text(Path(yaml_file)), str(yaml_file))
        return self._filled(found.values, allow_extra_keys, places_in(found))


def places_in(document: documents.Document) -> dict[str, str]:
    """Return where each value of a file was set: `args.yaml:3`."""
    return {name: document.place(name) for name in document.values}


def _noted(instance: Any, sources: Mapping[str, str]) -> Any:
    """`instance`, which knows where its arguments were set if it is one of `TrainingArguments`."""
    if isinstance(instance, TrainingArguments):
        own = {name: place for name, place in sources.items() if instance.is_given(name)}
        old = {OLD_NAMES[name].new: place for name, place in sources.items() if name in OLD_NAMES}
        note_sources(instance, {**{name: place for name, place in old.items() if name}, **own})
    return instance


def _converted(dtype: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with text of fields that are numbers or bools converted."""
    kinds = {field.name: members(hint) for field, hint in _typed_fields(dtype)}
    return {name: from_text(value, kinds.get(name, (Any,))) for name, value in values.items()}


def _typed_fields(dtype: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    from typing import get_type_hints

    try:
        types = get_type_hints(dtype)
    except NameError as error:
        raise RuntimeError(
            f"the types of {dtype.__name__} cannot be resolved ({error}); declare it and its types in a module"
        ) from error
    return [(field, types[field.name]) for field in dataclasses.fields(dtype) if field.init]


def _passed_on(field: dataclasses.Field[Any], value: Any, given: Mapping[str, str]) -> bool:
    if field.name in given:
        return True
    default = default_of(field)
    return default is dataclasses.MISSING or bool(value != default)


def _args_files(
    words: list[str], beside_script: bool, name: str | None, flag: str | None
) -> tuple[list[Path], list[str]]:
    """The files to read more words from, least important first, and the words without the flag that names files."""
    files: list[Path] = []
    if name:
        files.append(Path(name))
    elif beside_script and sys.argv and sys.argv[0]:
        beside = Path(sys.argv[0]).with_suffix(".args")
        files += [beside] if beside.exists() else []
    if flag:
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument(flag, dest="files", type=Path, action="append", default=[])
        found, words = finder.parse_known_args(words)
        files.extend(found.files)
    return files, words
