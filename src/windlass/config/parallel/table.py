"""All settings, and indexes of them by their spellings."""

from __future__ import annotations

import dataclasses
from typing import Any

from windlass.config.parallel import rows_compile, rows_deepspeed, rows_float8, rows_launch, rows_training
from windlass.config.parallel.keys import FAMILIES, Key
from windlass.config.parallel.settings import Settings

TRAINING = (
    *rows_training.RUN,
    *rows_training.FSDP,
    *rows_training.MESH,
    *rows_training.DDP,
    *rows_compile.COMPILE,
    *rows_float8.FLOAT8,
    *rows_deepspeed.DEEPSPEED,
)
# Families that are refused as a whole, because what they configure is not built.
UNBUILT = rows_launch.MEGATRON
KEYS: dict[str, Key] = {
    key.name: key for key in (*TRAINING, *rows_launch.LAUNCH, *rows_launch.DEEPSPEED, *UNBUILT)
}
FLAGS: dict[str, Key] = {word: key for key in KEYS.values() for word in key.flags}
VARIABLES: dict[str, Key] = {word: key for key in TRAINING for word in key.variables}


def words_of(section: str) -> dict[str, Key]:
    """Every spelling inside a section of a launch file ("" is its top level), with and without the flag's prefix."""
    found: dict[str, Key] = {}
    for key in KEYS.values():
        family = FAMILIES[key.family]
        if family.section == section:
            found.update({prefix + word: key for word in key.words for prefix in ("", family.flag or "")})
    return found


SECTIONS: dict[str, dict[str, Key]] = {
    family.section: words_of(family.section) for family in FAMILIES.values() if family.section
}
# Files of accelerate have it in this section too.
SECTIONS["deepspeed_config"]["gradient_accumulation_steps"] = rows_training.ACCUMULATION
UNBUILT_SECTIONS = {FAMILIES[key.family].section for key in UNBUILT}
TOP_LEVEL = words_of("")


# Every spelling of a setting, but for keys of a launch file's sections; where two settings share one, the first counts.
SPELLINGS: dict[str, Key] = {
    **{field: key for key in reversed(KEYS.values()) for field in key.fields},
    **FLAGS,
    **VARIABLES,
    **KEYS,
}


def values_for(settings: Settings, start: str, kind: type) -> dict[str, Any]:
    """The values of the settings `start.NAME` for those NAMEs that are fields of dataclass `kind`."""
    names = {field.name for field in dataclasses.fields(kind)}
    found = {key.name.partition(".")[2]: key for key in KEYS.values() if key.name.startswith(f"{start}.")}
    return {name: settings.value(key) for name, key in found.items() if name in names}
