"""What a setting is called: one canonical name, and its spelling in every place that can say it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from windlass.config.parallel.kinds import Reader, flag

_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, "", "no", "false", "none", 0)


@dataclass(frozen=True, slots=True)
class Family:
    """Settings that share how they are spelt.

    Attributes:
        title: what they are about, as the launcher's help says it; "" for those that it does not list apart.
        section: the section of the launch file; "" is its top level. A word inside may repeat the flag's prefix.
        flag: prefix of the launcher's flag after the dashes; None when no flag says it.
        variable: prefix of the environment variable; None when no variable says it.
        switch: the variable without which accelerate does not read the others.
    """

    title: str
    section: str
    flag: str | None
    variable: str | None
    switch: str = ""


FAMILIES = {
    "run": Family("training", "", "", "ACCELERATE_"),
    "launch": Family("processes and machines", "", "", None),
    "file": Family("", "", None, None),
    "ddp": Family("replicated models (DDP)", "ddp_config", "ddp_", None),
    "fsdp": Family("sharded models (FSDP2)", "fsdp_config", "fsdp_", "FSDP_", "ACCELERATE_USE_FSDP"),
    "dynamo": Family("compilation", "dynamo_config", "dynamo_", "ACCELERATE_DYNAMO_"),
    "mesh": Family("layout of the processes", "parallelism_config", "parallelism_config_", "PARALLELISM_CONFIG_",
                   "ACCELERATE_USE_PARALLELISM_CONFIG"),
    "fp8": Family("", "fp8_config", "fp8_", "ACCELERATE_FP8_"),
    "deepspeed": Family("", "deepspeed_config", "", "ACCELERATE_DEEPSPEED_"),
    "megatron": Family("", "megatron_lm_config", "megatron_lm_", "MEGATRON_LM_"),
}  # fmt: skip


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Key:
    """One setting.

    Attributes:
        name: canonical, as in a recipe's `parallel:` section: "fsdp.cpu_offload".
        read: brings any spelling of a value to the canonical one.
        default: what holds when nobody says anything.
        doc: one sentence.
        family: a key of `FAMILIES`.
        words: what it is called inside the family; the first is the one that Windlass writes.
        fields: fields of `TrainingArguments` that say it; the first is the one that a recipe's value goes to.
        written: the value that `accelerate launch` puts into the environment when its user said nothing.
        write: the canonical value as files spell it that `accelerate launch` reads too.
        refused: why it cannot be set; empty when it can.
        idle: what to say once when it is set and nothing depends on it; empty when something does.
    """

    name: str
    read: Reader
    default: Any
    doc: str
    family: str
    words: tuple[str, ...]
    fields: tuple[str, ...] = ()
    written: Any = None
    write: Callable[[Any], Any] = _same
    refused: str = ""
    idle: str = ""

    def is_switch(self, word: str) -> bool:
        """Whether its flag `word` needs no value. Those of sharding take one, as in accelerate."""
        return word == "use_fsdp" or (self.read is flag and self.family not in ("fsdp", "ddp"))

    @property
    def flags(self) -> tuple[str, ...]:
        """The launcher's flags, without dashes."""
        prefix = FAMILIES[self.family].flag
        return () if prefix is None else tuple(prefix + word for word in self.words)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables that say it."""
        prefix = FAMILIES[self.family].variable
        return () if prefix is None else tuple(prefix + word.upper() for word in self.words)

    @property
    def in_file(self) -> str:
        """Where Windlass writes it in a launch file: "num_processes", "fsdp_config.fsdp_offload_params"."""
        section = FAMILIES[self.family].section
        word = self.words[0]
        # The guides' files repeat the prefix in this one section.
        inside = f"fsdp_{word}" if self.family == "fsdp" else word
        return f"{section}.{inside}" if section else word

    def is_weak(self, value: Any) -> bool:
        """Whether tools write `value` unasked, so that it is no one's wish."""
        return value == self.default or (self.written is not None and value == self.written)

    def asks(self, raw: Any) -> bool:
        """Whether a refused key is set to something that would change anything."""
        if raw in ([], {}) or str(raw).lower() == str(self.written).lower():
            return False
        return raw not in _ASKS_FOR_NOTHING and str(raw).lower() not in _ASKS_FOR_NOTHING


def rows_of(family: str, name: str = "") -> Callable[..., Key]:
    """What makes the rows of a family, whose canonical names begin with `name` (the family's own by default).

    The function takes the last part of the name, `read`, `default` and `doc`, the words (by default the name's last
    part), and the other attributes of a `Key` by name.
    """

    def row(last: str, read: Reader, default: Any, doc: str, *words: str, **others: Any) -> Key:
        return Key(f"{name or family}.{last}", read, default, doc, family, words or (last,), **others)

    return row


def index(keys: Iterable[Key]) -> dict[str, Key]:
    return {key.name: key for key in keys}
