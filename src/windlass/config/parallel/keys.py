"""What a setting is called: one canonical name, and its spelling in every place that can say it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from windlass.config.parallel.kinds import Reader, flag

_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, "", "no", "false", "none", 0)


@dataclass(frozen=True, slots=True)
class Group:
    """Settings that share how they are spelt.

    Attributes:
        section: the section of the launch file; "" is its top level. A word inside may repeat the flag's prefix.
        flag: prefix of the launcher's flag after the dashes; None when no flag says it.
        variable: prefix of the environment variable; None when no variable says it.
    """

    section: str
    flag: str | None
    variable: str | None


GROUPS = {
    "run": Group("", "", "ACCELERATE_"),
    "launch": Group("", "", None),
    "file": Group("", None, None),
    "ddp": Group("ddp_config", "ddp_", None),
    "fsdp": Group("fsdp_config", "fsdp_", "FSDP_"),
    "dynamo": Group("dynamo_config", "dynamo_", "ACCELERATE_DYNAMO_"),
    "mesh": Group("parallelism_config", "parallelism_config_", "PARALLELISM_CONFIG_"),
    "fp8": Group("fp8_config", "fp8_", "ACCELERATE_FP8_"),
    "deepspeed": Group("deepspeed_config", "", "ACCELERATE_DEEPSPEED_"),
    "megatron": Group("megatron_lm_config", "megatron_lm_", "MEGATRON_LM_"),
}


@dataclass(frozen=True, slots=True)
class Key:
    """One setting.

    Attributes:
        name: canonical, as in a recipe's `parallel:` section: "fsdp.cpu_offload".
        read: brings any spelling of a value to the canonical one.
        default: what holds when nobody says anything.
        doc: one sentence.
        group: a key of `GROUPS`.
        words: what it is called inside the group; the first is the one that Windlass writes.
        fields: fields of `TrainingArguments` that say it.
        written: the value that `accelerate launch` puts into the environment when its user said nothing.
        refused: why it cannot be set; empty when it can.
        idle: what to say once when it is set and nothing depends on it; empty when something does.
    """

    name: str
    read: Reader
    default: Any
    doc: str
    group: str
    words: tuple[str, ...]
    fields: tuple[str, ...] = ()
    written: Any = None
    refused: str = ""
    idle: str = ""

    def is_switch(self, word: str) -> bool:
        """Whether its flag `word` needs no value. Those of sharding take one, as in accelerate."""
        return word == "use_fsdp" or (self.read is flag and self.group not in ("fsdp", "ddp"))

    @property
    def flags(self) -> tuple[str, ...]:
        """The launcher's flags, without dashes."""
        prefix = GROUPS[self.group].flag
        return () if prefix is None else tuple(prefix + word for word in self.words)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables that say it."""
        prefix = GROUPS[self.group].variable
        return () if prefix is None else tuple(prefix + word.upper() for word in self.words)

    @property
    def in_file(self) -> str:
        """Where Windlass writes it in a launch file: "num_processes", "fsdp_config.fsdp_offload_params"."""
        group = GROUPS[self.group]
        word = self.words[0]
        # The guides' files repeat the prefix in this one section.
        inside = f"fsdp_{word}" if self.group == "fsdp" else word
        return f"{group.section}.{inside}" if group.section else word

    def is_weak(self, value: Any) -> bool:
        """Whether tools write `value` unasked, so that it is no one's wish."""
        return value == self.default or (self.written is not None and value == self.written)

    def asks(self, raw: Any) -> bool:
        """Whether a refused key is set to something that would change anything."""
        if raw in ([], {}) or str(raw).lower() == str(self.written).lower():
            return False
        return raw not in _ASKS_FOR_NOTHING and str(raw).lower() not in _ASKS_FOR_NOTHING


def index(keys: Iterable[Key]) -> dict[str, Key]:
    return {key.name: key for key in keys}
