"""The support table: each name that users of `Trainer` know, and what Windlass does with it.

It is derived from the declarations of arguments, settings and old names, and from `support_rows`.
`python -m windlass.config.support > docs/support.md` writes the page.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.config import support_rows as rows
from windlass.config.accelerator_config import AcceleratorConfig
from windlass.config.arguments import TrainingArguments
from windlass.config.enums import OptimizerNames, SchedulerType
from windlass.config.helpers import Helpers
from windlass.config.parallel.from_launcher import OWN_VARIABLE, REFUSED
from windlass.config.parallel.keys import Key
from windlass.config.parallel.spelling import spellings
from windlass.config.parallel.table import FLAGS, KEYS, VARIABLES
from windlass.config.renamed import OLD_NAMES
from windlass.config.sections.generation import GenerationSection
from windlass.config.sections.setting import rules_of
from windlass.config.setters import Setters
from windlass.config.sft import SFTConfig


@dataclass(frozen=True, slots=True)
class Support:
    """What happens to a name. A reason is the end of the sentence "NAME ...".

    Attributes:
        refused: why setting it to other than its default is an error; empty if it is not.
        mapped: its effect, if it is accepted but does not do what its name says.
        means: what the name is, for tables that show it.
    """

    refused: str = ""
    mapped: str = ""
    means: str = ""

    @property
    def status(self) -> str:
        return "refused" if self.refused else "mapped" if self.mapped else "honoured"

    @property
    def note(self) -> str:
        return self.refused or self.mapped


Table = dict[str, Support]


def _table(honoured: Iterable[str], mapped: Mapping[str, str] = {}, refused: Mapping[str, str] = {}) -> Table:
    return {
        **{name: Support() for name in honoured},
        **{name: Support(mapped=note) for name, note in mapped.items()},
        **{name: Support(note) for name, note in refused.items()},
    }


def _declared(cls: Any) -> Table:
    """The fields of a class that `setting` declared."""
    means = {field.name: field.metadata["help"] for field in dataclasses.fields(cls)}
    return {name: Support(rules.refused, rules.mapped, means[name]) for name, rules in rules_of(cls).items()}


def _old_names() -> Table:
    notes = {name: old.note or f"is now {old.new}" for name, old in OLD_NAMES.items()}
    return {
        name: Support(note) if OLD_NAMES[name].refused else Support(mapped=note)
        for name, note in notes.items()
    }


def _helpers(*mixins: type) -> Table:
    return _table(name for cls in mixins for name in vars(cls) if not name.startswith("_"))


def _optimizers() -> Table:
    known = {member.value: rows.unbuilt_optimizer(member.value) or "" for member in OptimizerNames}
    return {name: Support(reason) for name, reason in {**known, **rows.GONE_OPTIMIZERS}.items()}


def _flags() -> Table:
    """The flags of `windlass launch`, which are those of `accelerate launch` and some of its own."""
    table = _table(f"--{word}" for word in ("config_file", "module", "no_python", "print"))
    for word, key in FLAGS.items():
        table[f"--{word}"] = _of_setting(key, f"--{word}", f"--{key.flags[0]}")
    return table


def _variables() -> Table:
    """The environment variables that launchers set."""
    table = {name: _of_setting(key, name, key.variables[0]) for name, key in VARIABLES.items()}
    return {OWN_VARIABLE: Support(), **table, **{name: Support(key.refused) for name, key in REFUSED.items()}}


def _of_setting(key: Key, spelling: str, first: str) -> Support:
    return Support(key.refused, key.idle or ("" if spelling == first else f"is another name of {first}"))


SECTIONS: dict[str, Table] = {
    "TrainingArguments": _declared(TrainingArguments),
    "Seq2SeqTrainingArguments": _declared(GenerationSection),
    "Renamed and removed arguments": _old_names(),
    "TrainingArguments helpers": _helpers(Helpers, Setters),
    "SFTConfig": {
        **{name: row for name, row in _declared(SFTConfig).items() if name in vars(SFTConfig)},
        **{old: Support(mapped=f"is now {new}") for old, new in SFTConfig.EARLIER_NAMES.items()},
    },
    "accelerator_config": _declared(AcceleratorConfig),
    "optim": _optimizers(),
    "lr_scheduler_type": _table(member.value for member in SchedulerType),
    "report_to": _table((*rows.TRACKERS, "all"), {}, dict.fromkeys(rows.UNBUILT_TRACKERS, rows.TRACKER_NOTE)),
    "Trainer constructor": _table(rows.CONSTRUCTOR.split(), rows.CONSTRUCTOR_MAPPED),
    "SFTTrainer constructor": _table(rows.TUNER.split(), rows.TUNER_MAPPED),
    "Names of TRL": _table(rows.TRL_NAMES.split(), rows.TRL_MAPPED, rows.TRL_REFUSED),
    "Trainer methods": _table(rows.METHODS.split(), rows.METHODS_MAPPED, rows.METHODS_REFUSED),
    "Seq2SeqTrainer": _table(rows.SEQ2SEQ.split()),
    "Callbacks": _table(rows.CALLBACKS.split(), {}, rows.CALLBACKS_REFUSED),
    "Data collators": _table(rows.COLLATORS.split()),
    "Accelerator arguments": _table(rows.ACCELERATOR.split(), {}, rows.ACCELERATOR_REFUSED),
    "Accelerator methods and properties": _table(
        rows.MEMBERS.split(), rows.MEMBERS_MAPPED, rows.MEMBERS_REFUSED
    ),
    "windlass launch": _flags(),
    "Environment variables": _variables(),
}


def markdown() -> str:
    """The page `docs/support.md`."""
    lines = [
        "# What Windlass does with each name",
        "",
        "Generated by `python -m windlass.config.support > docs/support.md`; a test compares the page with the code.",
        "",
        "*honoured*: does what its name says. *mapped*: accepted with the effect in the note. *refused*: setting it to",
        "other than its default raises an error with the reason, before anything starts.",
    ]
    for title, table in SECTIONS.items():
        counts = ", ".join(
            f"{sum(r.status == s for r in table.values())} {s}" for s in ("honoured", "mapped", "refused")
        )
        lines += ["", f"## {title}", "", f"{counts}.", "", *_rows(table)]
    return "\n".join([*lines, *_settings()]) + "\n"


def _rows(table: dict[str, Support]) -> Iterator[str]:
    means = any(row.means for row in table.values())
    yield "| name | status | note |" + (" means |" if means else "")
    yield "|---|---|---|" + ("---|" if means else "")
    for name, row in table.items():
        cells = (f"`{name}`", row.status, row.note, *((row.means,) if means else ()))
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _settings() -> Iterator[str]:
    """The lines of the table of settings: meaning, default, and the spelling in each place."""
    places = ("flag", "file", "variable", "arguments", "recipe")
    yield from ("", "## Settings of how training is spread and launched", "")
    yield "`windlass explain NAME` shows where the value of a setting comes from."
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
