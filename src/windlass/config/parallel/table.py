"""All settings, and the one that each spelling belongs to."""

from __future__ import annotations

from windlass.config.parallel import rows_launch, rows_training
from windlass.config.parallel.keys import GROUPS, Key, index

TRAINING = (
    *rows_training.RUN,
    *rows_training.FSDP,
    *rows_training.MESH,
    *rows_training.DDP,
    *rows_training.COMPILE,
)
# Families that are refused as a whole; what they would need is not built.
UNBUILT = (*rows_launch.DEEPSPEED, *rows_launch.MEGATRON, *rows_launch.FP8)
KEYS: dict[str, Key] = index((*TRAINING, *rows_launch.LAUNCH, *UNBUILT))
FLAGS: dict[str, Key] = {word: key for key in KEYS.values() for word in key.flags}
VARIABLES: dict[str, Key] = {word: key for key in TRAINING for word in key.variables}


def words_of(section: str) -> dict[str, Key]:
    """Every spelling inside a section of a launch file ("" is its top level), with and without the flag's prefix."""
    found: dict[str, Key] = {}
    for key in KEYS.values():
        group = GROUPS[key.group]
        if group.section == section:
            found.update({prefix + word: key for word in key.words for prefix in ("", group.flag or "")})
    return found


SECTIONS: dict[str, dict[str, Key]] = {
    group.section: words_of(group.section) for group in GROUPS.values() if group.section
}
TOP_LEVEL = words_of("")
