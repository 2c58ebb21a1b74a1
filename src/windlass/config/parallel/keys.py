"""Settings: the canonical name of each, its spelling in each place where it can be set, its values with their origin,
and the rules by which values of several origins are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from windlass.config.kinds import Reader, anything, flag
from windlass.config.sections.setting import setting
from windlass.core.errors import ConfigError, Problem

_REQUESTS_NOTHING: tuple[Any, ...] = (None, False, "", "no", "false", "none", 0)

# Refused flags that take no value.
_REFUSED_SWITCHES = {
    "use_megatron_lm",
    "tpu_use_cluster",
    "tpu_cluster",
    "tpu_use_sudo",
    "downcast_bf16",
    "use_autocast_during_eval",
}
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

    def read_for(self, field: str, raw: Any) -> Any:
        """`read`. Raises ConfigError about `field`."""
        try:
            return self.read(raw)
        except ValueError as error:
            raise ConfigError(Problem(field, raw, str(error))) from None

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

    def refuse(self, reason: str, *words: str, **written: Any) -> None:
        """Add settings that are known and refused; `written` has the values that accelerate exports by default."""
        for word in (*words, *written):
            read = flag if word in _REFUSED_SWITCHES else anything
            self(word, read, None, "Not built.", written=written.get(word), refused=reason)


_DEFAULT_OF_KEY: Any = object()


def setting_of(key: Key, default: Any = _DEFAULT_OF_KEY, **others: Any) -> Any:
    """A field that sets `key`: with its help, its reader, and its default unless the field has another. `others` are as
    for `setting`.
    """
    return setting(key.default if default is _DEFAULT_OF_KEY else default, key.doc, read=key.read, **others)


Source = Literal["script", "flag", "variable", "file", "default"]
# If two values differ, the one further left is used; a script that contradicts its launcher is an error.
_PRECEDENCE: tuple[Source, ...] = ("script", "flag", "variable", "file", "default")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it was set."""

    key: str  # canonical name
    value: Any  # in canonical form
    origin: str  # where it was set, as its author wrote it: "--num_processes", "fsdp_config of two.yaml"
    source: Source = "default"  # the kind of place
    # Written by a tool and not requested by anybody (such as a default in a file that `windlass config` wrote); any
    # explicit value replaces it
    implicit: bool = False
    # Settings of the same key that this one replaced
    overridden: tuple[Setting, ...] = field(default=(), compare=False)

    def problem(self, fix: str) -> Problem:
        """Its problem; `fix` is as for `Problem`."""
        return Problem(self.origin, self.value, fix)


class Settings(dict[str, Setting]):
    """Settings by canonical name, the problems found while reading them, and notes to log once."""

    def __init__(self, settings: Mapping[str, Setting] | None = None) -> None:
        super().__init__(settings or {})
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def record(self, key: Key, raw: Any, origin: str, source: Source, implicit: bool | None = None) -> None:
        """Read `raw` and record it, or the problem with it; None leaves the key unset. `implicit`: a tool may have
        written it; None decides by the value, for places that tools write.
        """
        if raw is None:
            return
        if key.refused:
            if key.would_change(raw):
                self.problems.append(Problem(origin, raw, key.refused))
            return
        try:
            value = key.read(raw)
        except ValueError as error:
            self.problems.append(Problem(origin, raw, str(error)))
            return
        if value is None:
            return
        if implicit is None:
            implicit = key.is_implicit(value)
        if key.idle and not implicit:
            self.notes.append(f"{origin}={raw!r} {key.idle}")
        self.add(Setting(key.name, value, origin, source, implicit))

    def add(self, new: Setting) -> None:
        """Merge `new` with the setting that exists: explicit values come first, then those of the stronger source."""
        old = self.get(new.key)
        if old is None:
            self[new.key] = new
            return
        if not old.implicit and not new.implicit and old.value != new.value and _must_agree(old, new):
            self.problems.append(contradiction(old, new))
        first, second = (old, new) if _goes_before(old, new) else (new, old)
        self[new.key] = replace(first, overridden=(*first.overridden, second))

    def value(self, key: Key) -> Any:
        found = self.get(key.name)
        return key.default if found is None else found.value

    def explicit(self, *keys: Key) -> list[Setting]:
        """The settings among `keys` that a user, and not only a tool, set; in order."""
        found = [self[key.name] for key in keys if key.name in self]
        return [setting for setting in found if not setting.implicit]

    def without_effect(self, why: str, *keys: Key) -> Iterator[Problem]:
        """A problem for each of `keys` that a script or a flag sets. What a file or a variable sets may be meant for
        other scripts.
        """
        fix = f"has no effect, for {why}, or leave it out"
        return (found.problem(fix) for found in self.explicit(*keys) if found.source in ("script", "flag"))


def merge(*layers: Settings) -> Settings:
    """Merge all layers. Flags come before variables, and these before files; a script must agree with the others.

    Contradictions between a script and its launcher, and within one place, become problems of the result.
    """
    merged = Settings()
    for layer in layers:
        merged.problems += layer.problems
        merged.notes += layer.notes
        for found in layer.values():
            merged.add(found)
    return merged


def contradiction(one: Setting, other: Setting) -> Problem:
    fix = f"contradicts {other.origin}={other.value!r}; set it in one of the two places, or to the same value in both"
    return one.problem(fix)


def _must_agree(one: Setting, other: Setting) -> bool:
    sources = {one.source, other.source}
    return len(sources) == 1 or ("script" in sources and "default" not in sources)


def _goes_before(old: Setting, new: Setting) -> bool:
    if old.implicit != new.implicit:
        return new.implicit
    return _PRECEDENCE.index(old.source) <= _PRECEDENCE.index(new.source)
