"""The support table: every name that users of `Trainer` know, and what Windlass does with it.

It is the one source of what `validate` refuses, what `docs/support.md` says and what the tests hold the code to.
`python -m windlass.config.support > docs/support.md` writes the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from windlass.config import support_accelerate as loop_rows
from windlass.config import support_rows as rows
from windlass.config.arguments import TrainingArguments
from windlass.config.enums import OptimizerNames, SchedulerType
from windlass.config.parallel.from_launcher import OWN_VARIABLE, REFUSED
from windlass.config.parallel.keys import Key
from windlass.config.parallel.spelling import spellings
from windlass.config.parallel.table import FLAGS, KEYS, VARIABLES
from windlass.config.renamed import OLD_NAMES
from windlass.config.sections.setting import rules_of

Status = Literal["honoured", "mapped", "refused"]


@dataclass(frozen=True, slots=True)
class Support:
    """What happens to a name.

    Attributes:
        status: honoured: does what its name says. mapped: accepted, and taken as something else that `note` names.
            refused: an error says why, when it is set to other than its default.
        note: a sentence to follow the name.
    """

    status: Status
    note: str = ""


def _table(honoured: str, mapped: dict[str, str], refused: dict[str, str]) -> dict[str, Support]:
    table = {name: Support("honoured") for name in honoured.split()}
    table.update({name: Support("mapped", note) for name, note in mapped.items()})
    table.update({name: Support("refused", note) for name, note in refused.items()})
    return table


def _arguments() -> dict[str, Support]:
    table = {}
    for name, rules in rules_of(TrainingArguments).items():
        status: Status = "refused" if rules.refused else "mapped" if rules.mapped else "honoured"
        table[name] = Support(status, rules.refused or rules.mapped)
    return table


def _old_names() -> dict[str, Support]:
    table = {}
    for name, old in OLD_NAMES.items():
        status: Status = "refused" if old.refused else "mapped"
        table[name] = Support(status, old.note or f"is now {old.new}")
    return table


def _optimizers() -> dict[str, Support]:
    table = {}
    for member in OptimizerNames:
        reason = rows.unbuilt_optimizer(member.value)
        table[member.value] = Support("honoured") if reason is None else Support("refused", reason)
    table.update({name: Support("refused", note) for name, note in rows.GONE_OPTIMIZERS.items()})
    return table


def _flags() -> dict[str, Support]:
    """The flags of `windlass launch`, which are those of `accelerate launch` and some of its own."""
    table = {f"--{word}": Support("honoured") for word in ("config_file", "module", "no_python", "print")}
    for word, key in FLAGS.items():
        table[f"--{word}"] = _of_setting(key, f"--{key.flags[0]}", word == key.flags[0])
    return table


def _variables() -> dict[str, Support]:
    """The environment variables that launchers set."""
    table = {OWN_VARIABLE: Support("honoured")}
    for name, key in VARIABLES.items():
        table[name] = _of_setting(key, key.variables[0], name == key.variables[0])
    return {**table, **{name: Support("refused", key.refused) for name, key in REFUSED.items()}}


def _of_setting(key: Key, spelling: str, is_first: bool) -> Support:
    if key.refused:
        return Support("refused", key.refused)
    if key.idle:
        return Support("mapped", key.idle)
    return Support("honoured") if is_first else Support("mapped", f"is another word for {spelling}")


SECTIONS: dict[str, dict[str, Support]] = {
    "TrainingArguments": _arguments(),
    "Renamed and removed arguments": _old_names(),
    "TrainingArguments helpers": _table(rows.HELPERS, {}, {}),
    "accelerator_config": _table(
        "gradient_accumulation_kwargs", rows.ACCELERATOR_MAPPED, rows.ACCELERATOR_REFUSED
    ),
    "optim": _optimizers(),
    "lr_scheduler_type": _table(" ".join(member.value for member in SchedulerType), {}, {}),
    "report_to": _table(
        " ".join((*rows.TRACKERS, "all")), {}, dict.fromkeys(rows.UNBUILT_TRACKERS, rows.TRACKER_NOTE)
    ),
    "Trainer constructor": _table(rows.CONSTRUCTOR, rows.CONSTRUCTOR_MAPPED, {}),
    "Trainer methods": _table(rows.METHODS, rows.METHODS_MAPPED, rows.METHODS_REFUSED),
    "Callbacks": _table(rows.CALLBACKS, {}, rows.CALLBACKS_REFUSED),
    "Data collators": _table(rows.COLLATORS, {}, {}),
    "Accelerator arguments": _table(
        loop_rows.ARGUMENTS_HONOURED, loop_rows.ARGUMENTS_MAPPED, loop_rows.ARGUMENTS_REFUSED
    ),
    "Accelerator methods and properties": _table(
        loop_rows.MEMBERS_HONOURED, loop_rows.MEMBERS_MAPPED, loop_rows.MEMBERS_REFUSED
    ),
}

SECTIONS["windlass launch"] = _flags()
SECTIONS["Environment variables"] = _variables()


def markdown() -> str:
    """The table as the page `docs/support.md`."""
    lines = [
        "# What Windlass does with each name",
        "",
        "Made from the code by `python -m windlass.config.support > docs/support.md`; a test holds the two together.",
        "",
        "*honoured*: does what its name says. *mapped*: accepted, and taken as what the note says. *refused*: an error",
        "says why before anything starts, when it is set to something other than its default.",
    ]
    for title, table in SECTIONS.items():
        counts = ", ".join(
            f"{sum(r.status == s for r in table.values())} {s}" for s in ("honoured", "mapped", "refused")
        )
        lines += ["", f"## {title}", "", f"{counts}.", "", "| name | status | note |", "|---|---|---|"]
        lines += [
            f"| `{name}` | {row.status} | {row.note.replace('|', '/')} |" for name, row in table.items()
        ]
    return "\n".join([*lines, *_settings()]) + "\n"


def _settings() -> Iterator[str]:
    """The lines of the table of settings: what each means, its default, and its spelling in each place."""
    places = ("flag", "file", "variable", "arguments", "recipe")
    yield from ("", "## Settings of how training is spread and launched", "")
    yield "`windlass explain NAME` says where the value of one comes from."
    yield from (
        "",
        f"| setting | means | default | {' | '.join(places)} |",
        "|---|---|---|---|---|---|---|---|",
    )
    for key in KEYS.values():
        if not key.refused and not key.idle:
            said = dict(spellings(key))
            default = json.dumps(list(key.default) if isinstance(key.default, tuple) else key.default)
            cells = [f"`{said[place]}`" if place in said else "" for place in places]
            yield f"| `{key.name}` | {key.doc} | `{default}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(markdown(), end="")
