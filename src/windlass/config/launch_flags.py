"""The flags of `windlass launch`: every spelling in the table of settings, and how the script is started."""

from __future__ import annotations

import argparse

from windlass.config.parallel import kinds
from windlass.config.parallel.keys import FAMILIES, Key
from windlass.config.parallel.table import KEYS

_SHORT = {"tee": "-t", "quiet": "-q"}


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags, and the script with its arguments, to `parser` (made with `allow_abbrev=False`).

    Options that were not given are absent from the parsed ones. Values stay text: `resolve_launch` reads them, so that
    all problems are reported together.
    """
    add_setting_flags(parser)
    how = parser.add_argument_group("the script")
    how.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    how.add_argument("--no_python", "--no-python", action="store_true", help="the script is a program")
    how.add_argument("script", help="what to start")
    how.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config_file` and the flags of all settings, without a script."""
    parser.add_argument(
        "--config_file", "--config-file", metavar="FILE", help="settings in YAML; flags override them"
    )
    titles = {name: family.title for name, family in FAMILIES.items() if family.title}
    groups = {name: parser.add_argument_group(title) for name, title in titles.items()}
    for key in KEYS.values():
        for word in key.flags:
            _add(groups.get(key.family, parser), key, word)


def _add(group: argparse._ActionsContainer, key: Key, word: str) -> None:
    names = [f"--{word}"] + ([f"--{word.replace('_', '-')}"] if "_" in word else [])
    if word in _SHORT:
        names.insert(0, _SHORT[word])
    said = argparse.SUPPRESS
    # Help lists one spelling of each setting.
    about = said if key.refused or word != key.flags[0] else key.doc.replace("%", "%%")
    if key.is_switch(word):
        group.add_argument(*names, dest=word, action="store_true", default=said, help=about)
    else:
        # Torch's flag for pairs takes all of them at once; pairs of the others may contain commas.
        several = (key.read is kinds.options and word != "rdzv_conf") or word == "vm"
        action = "append" if several else "store"
        group.add_argument(*names, dest=word, action=action, default=said, help=about, metavar="VALUE")
