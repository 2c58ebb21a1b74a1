"""The description of a setting: one canonical name, and its spelling in each place where it can be set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windlass.config.kinds import Reader, anything, flag
from windlass.config.sections.setting import setting

_REQUESTS_NOTHING: tuple[Any, ...] = (None, False, "", "no", "false", "none", 0)

# Several families have settings of it.
NO_MEGATRON = (
    "needs Megatron-LM, which is not built yet; distributed_type: FSDP shards the model by its layers"
)


@dataclass(frozen=True, slots=True)
class Family:
    """Settings whose spellings have the same prefixes."""

    title: str  # heading in the launcher's help; "" for families without one
    # The section of the launch file; "" is its top level. A word inside may repeat the flag's prefix.
    section: str
    flag: str | None  # prefix of the launcher's flags after the dashes; None if there are no flags
    variable: str | None  # prefix of the environment variables; None if there are none
    switch: str = ""  # the variable that must be true for accelerate to read the others


FAMILIES = {
    "run": Family("training", "", "", "ACCELERATE_"),
    "launch": Family("processes and machines", "", "", None),
    "file": Family("", "", None, None),
    "loop": Family("", "", None, None),
    "ddp": Family("replicated models (DDP)", "ddp_config", "ddp_", None),
    "fsdp": Family("sharded models (FSDP2)", "fsdp_config", "fsdp_", "FSDP_", "ACCELERATE_USE_FSDP"),
    "dynamo": Family("compilation", "dynamo_config", "dynamo_", "ACCELERATE_DYNAMO_"),
    "mesh": Family("layout of the processes", "parallelism_config", "parallelism_config_", "PARALLELISM_CONFIG_",
                   "ACCELERATE_USE_PARALLELISM_CONFIG"),
    "fp8": Family("matrix products in float8", "fp8_config", "fp8_", "ACCELERATE_FP8_"),
    "deepspeed": Family("DeepSpeed", "deepspeed_config", "", "ACCELERATE_DEEPSPEED_", "ACCELERATE_USE_DEEPSPEED"),
    "megatron": Family("", "megatron_lm_config", "megatron_lm_", "MEGATRON_LM_"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    name: str  # canonical, as in a recipe's `parallel:` section: "fsdp.cpu_offload"
    read: Reader  # converts any spelling of a value to the canonical one
    default: Any  # the value if no source sets it
    doc: str  # one sentence
    family: str  # a key of `FAMILIES`
    words: tuple[str, ...]  # its names inside the family; Windlass writes the first
    # Fields of `TrainingArguments` that set it; a recipe's value goes to the first
    fields: tuple[str, ...] = ()
    # The value that `accelerate launch` exports if its user set nothing; None if it is the default
    written: Any = None
    # Converts the canonical value to the spelling that `accelerate launch` reads in files
    write: Callable[[Any], Any] = anything
    refused: str = ""  # why it cannot be set; empty if it can
    idle: str = ""  # note to log if it is set, for settings that change nothing; empty for the others
    exported: tuple[str, ...] = ()  # further environment variables that set it

    def is_switch(self, word: str) -> bool:
        """Return True if its flag `word` takes no value. Flags of sharding take one, as in accelerate."""
        if word == "parallelism_config_sp_seq_length_is_variable":
            return False
        return word in ("use_fsdp", "use_deepspeed", "fp8_use_autocast_during_eval") or (
            self.read is flag and self.family not in ("fsdp", "ddp", "deepspeed", "fp8")
        )

    @property
    def flags(self) -> tuple[str, ...]:
        """The launcher's flags, without dashes."""
        prefix = FAMILIES[self.family].flag
        return () if prefix is None else tuple(prefix + word for word in self.words)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables that set it."""
        prefix = FAMILIES[self.family].variable
        own = () if prefix is None else tuple(prefix + word.upper() for word in self.words)
        return own + self.exported

    @property
    def in_file(self) -> str:
        """Its key in a launch file that Windlass writes: "num_processes", "fsdp_config.fsdp_offload_params"."""
        section = FAMILIES[self.family].section
        word = self.words[0]
        # In this section, files repeat the prefix by convention.
        inside = f"fsdp_{word}" if self.family == "fsdp" else word
        return f"{section}.{inside}" if section else word

    def is_implicit(self, value: Any) -> bool:
        """Return True if tools write `value` by default, so that it may not be a user's choice."""
        return value == self.default or (self.written is not None and value == self.written)

    def would_change(self, raw: Any) -> bool:
        """Return True if a refused key is set to a value that would have an effect."""
        if raw in ([], {}) or str(raw).lower() == str(self.written).lower():
            return False
        return raw not in _REQUESTS_NOTHING and str(raw).lower() not in _REQUESTS_NOTHING


class Rows(list[Key]):
    """The settings of a family, in the order in which they are declared: calling it adds one and returns it.

    Args:
        family: a key of `FAMILIES`.
        prefix: begins their canonical names; by default the family's name and a dot.
    """

    def __init__(self, family: str, prefix: str | None = None) -> None:
        super().__init__()
        self._family, self._prefix = family, f"{family}." if prefix is None else prefix

    def __call__(self, last: str, read: Reader, default: Any, doc: str, *words: str, **others: Any) -> Key:
        """Add a setting.

        Args:
            last: the last part of its name, and its word if `words` has none.
            others: the other attributes of `Key`.
        """
        self.append(Key(self._prefix + last, read, default, doc, self._family, words or (last,), **others))
        return self[-1]

    def switch(self, last: str, doc: str, *words: str, **others: Any) -> Key:
        """Add a setting that is off unless it is set."""
        return self(last, flag, False, doc, *words, **others)


_DEFAULT_OF_KEY: Any = object()


def setting_of(key: Key, default: Any = _DEFAULT_OF_KEY, **others: Any) -> Any:
    """A field that sets `key`: with its help, its reader, and its default unless the field has another. `others` are as
    for `setting`.
    """
    return setting(key.default if default is _DEFAULT_OF_KEY else default, key.doc, read=key.read, **others)
