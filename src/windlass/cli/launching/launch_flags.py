"""The flags of `windlass launch`: every spelling in the table of settings, and how the script is started."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from windlass.config import kinds
from windlass.config.parallel.keys import FAMILIES, Key
from windlass.config.parallel.table import KEYS

_SHORT = {"tee": "-t", "quiet": "-q"}


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags, and the script with its arguments, to `parser` (made with `allow_abbrev=False`).

    Options that were not given are absent from the parsed ones. Values stay text: `resolve_launch` reads them, so that
    all problems are reported together.
    """
    add = parser.add_argument_group("the script").add_argument
    add("script", metavar="SCRIPT", help="what to start")
    rest = add(
        "arguments", metavar="ITS ARGUMENTS", nargs=argparse.REMAINDER, help="passed to it as they are"
    )
    rest.required = False  # argparse would report them as missing with the script
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    _add_spellings(
        add, "no_python", action="store_true", help="SCRIPT is a program, and is not run by Python"
    )
    add(
        "--compat",
        action="store_true",
        help="its imports of transformers' trainer and of accelerate get Windlass, as in `windlass run`",
    )
    add("--print", action="store_true", help="show the job that would run, and start nothing")
    add_setting_flags(parser)


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config_file` and the flags of all settings, without a script. The help lists one spelling of each setting
    that has an effect.
    """
    titles = {name: family.title for name, family in FAMILIES.items() if family.title}
    groups = {
        name: parser.add_argument_group(titles[name])
        for name in sorted(titles, key=lambda name: name != "launch")
    }
    file = "settings in YAML; flags override them (default: the file that `windlass config` writes)"
    _add_spellings(groups["launch"].add_argument, "config_file", metavar="FILE", help=file)
    for key in KEYS.values():
        for word in key.flags:
            _add(groups.get(key.family, parser), key, word)


def _add(group: argparse._ActionsContainer, key: Key, word: str) -> None:
    absent = argparse.SUPPRESS
    is_shown = not (key.refused or key.idle) and word == key.flags[0]
    about = _about(key) if is_shown else absent
    if key.is_switch(word):
        _add_spellings(group.add_argument, word, action="store_true", default=absent, help=about)
    else:
        # Torch's flag for pairs takes all of them at once; pairs of the others may contain commas.
        several = (key.read in (kinds.options, kinds.variables) and word != "rdzv_conf") or word == "vm"
        action, shape = "append" if several else "store", kinds.shape(key.read)
        _add_spellings(group.add_argument, word, action=action, default=absent, help=about, metavar=shape)


def _add_spellings(add: Callable[..., Any], word: str, **options: Any) -> None:
    """Add the flag `word`, and its spelling with dashes, which the help does not list."""
    add(*([_SHORT[word]] if word in _SHORT else []), f"--{word}", dest=word, **options)
    if "_" in word:
        add(f"--{word.replace('_', '-')}", dest=word, **{**options, "help": argparse.SUPPRESS})


def _about(key: Key) -> str:
    unset = key.default in (None, False, {}, ())
    return (key.doc + ("" if unset else f" (default: {key.default})")).replace("%", "%%")
