"""Keys that several programs have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NO_SUCH_KEY = "a recipe has no such key"


class ForeignConfig:
    """A configuration of another program. A key that was not read is reported, so that none is lost silently.

    Keys without a value count as absent, as those programs take them.

    Args:
        folder: of the file; other files that it names may be relative to it.
        within: dotted key of these values in the file, for a part of it.
    """

    def __init__(self, values: Mapping[str, Any], folder: Path = Path(), within: str = "") -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.folder = folder
        self._within = within
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`; the key counts as read."""
        self._read.add(name)
        return self.values.get(name, default)

    def skip(self, names: Iterable[str]) -> None:
        """Count keys as read that ask for what a recipe does anyway, or for what changes no result."""
        self._read.update(names)

    def unread(self) -> dict[str, Any]:
        """Return the keys that were not read."""
        return {name: value for name, value in self.values.items() if name not in self._read}

    def dotted(self, name: str) -> str:
        """Return the name of a key within the file."""
        return f"{self._within}{name}"


@dataclass(slots=True)
class Conversion:
    """The recipe under construction."""

    program: str  # whose configuration is converted
    recipe: dict[str, Any] = field(default_factory=lambda: {"task": "sft"})  # sections and their values
    # Key of the file -> value and reason, for what the recipe does not have
    lost: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def put(self, dotted: str, value: Any) -> None:
        """Set a key of the recipe; later ones win."""
        *sections, last = dotted.split(".")
        place = self.recipe
        for name in sections:
            place = place.setdefault(name, {})
        place[last] = value

    def get(self, dotted: str) -> Any:
        """Return the value of a key that was set, else None."""
        place: Any = self.recipe
        for name in dotted.split("."):
            place = place.get(name) if isinstance(place, dict) else None
        return place

    def lose(self, source: ForeignConfig, name: str, why: str, value: Any = None) -> None:
        """Report a key of the file, or a default of the program, that the recipe does not have."""
        found = source.take(name)
        self.lost[source.dotted(name)] = (value if found is None else found), why

    def lose_rest(self, source: ForeignConfig, reasons: Mapping[str, str]) -> None:
        """Report all keys that were not read."""
        for name in source.unread():
            self.lose(source, name, reasons.get(name, _NO_SUCH_KEY))


def named_items(name: str, items: Any) -> list[tuple[str, Any]]:
    """Return each item of a list, or the only one, with what its keys are called by: `name.` or `name[0].`."""
    items = items if isinstance(items, list) else [items]
    return [(f"{name}." if len(items) == 1 else f"{name}[{at}].", item) for at, item in enumerate(items)]


_DTYPES = ("float32", "bfloat16", "float16")
# option of peft.LoraConfig -> the keys that set it
_ADAPTER: dict[str, tuple[str, ...]] = {
    "lora_alpha": ("lora_alpha",),
    "lora_dropout": ("lora_dropout",),
    "target_modules": ("lora_target_modules", "lora_target"),
    "target_parameters": ("lora_target_parameters",),
    "modules_to_save": ("lora_modules_to_save", "additional_target"),
    "use_dora": ("use_dora", "peft_use_dora"),
    "use_rslora": ("use_rslora", "peft_use_rslora"),
    "layers_to_transform": ("peft_layers_to_transform",),
    "layers_pattern": ("peft_layers_pattern",),
    "init_lora_weights": ("peft_init_lora_weights",),
    "trainable_token_indices": ("peft_trainable_token_indices",),
    "fan_in_fan_out": ("lora_fan_in_fan_out",),
}
_LISTS = ("target_modules", "modules_to_save")


def put_adapter(made: Conversion, source: ForeignConfig, defaults: Mapping[str, Any], rank: str) -> None:
    """Set the section `adapter`: the program's defaults, replaced by what the file has.

    Args:
        rank: the key of the rank.
    """
    made.put("adapter.task_type", "CAUSAL_LM")
    for name, value in defaults.items():
        made.put(f"adapter.{name}", value)
    if (size := source.take(rank)) is not None:
        made.put("adapter.r", size)
    for option, names in _ADAPTER.items():
        for name in names:
            if (value := source.take(name)) is not None:
                made.put(f"adapter.{option}", _words(value) if option in _LISTS else value)


def _words(value: Any) -> Any:
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else list(value)
    return "all-linear" if words in (["all"], ["all-linear"]) else words


def put_quantization(made: Conversion, source: ForeignConfig, adapts: bool) -> None:
    """Set weights of few bits, which need an adapter."""
    for name, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if not source.take(name, False):
            continue
        if adapts:
            made.put("quantization", kind)
        else:
            made.lose(source, name, "needs an adapter, which is trained instead")


def put_dtype(made: Conversion, source: ForeignConfig, *names: str) -> None:
    """Set the dtype of the weights."""
    for name in names:
        if (value := source.take(name)) in _DTYPES:
            made.put("model.dtype", value)
        elif value is not None:
            made.lose(source, name, f"a recipe names {', '.join(_DTYPES)}")


def put_model_options(made: Conversion, source: ForeignConfig, revision: str = "model_revision") -> None:
    """Set options of `from_pretrained`."""
    if source.take(revision, "main") != "main":
        made.put("training.model_init_kwargs.revision", source.take(revision))
    if attention := source.take("attn_implementation"):
        made.put("training.model_init_kwargs.attn_implementation", attention)


def put_old_training_keys(made: Conversion, source: ForeignConfig) -> None:
    """Set training arguments under the names that replaced those of the file."""
    if (share := source.take("warmup_ratio")) is not None and not source.values.get("warmup_steps"):
        made.put("training.warmup_steps", share)
        # 0 beside a ratio is the ratio.
        source.skip(("warmup_steps",))
    if source.take("group_by_length", False):
        made.put("training.train_sampling_strategy", "group_by_length")


def put_early_stopping(made: Conversion, source: ForeignConfig, name: str) -> None:
    """Set early stopping on the evaluation's loss, unless the file names another metric."""
    patience = source.take(name)
    if not patience:
        return
    made.put("early_stopping.patience", patience)
    if "metric_for_best_model" not in source.values:
        made.put("training.metric_for_best_model", "loss")
        made.put("training.greater_is_better", False)


def put_fraction(made: Conversion, source: ForeignConfig, name: str) -> None:
    """Set the share of the data that is held out."""
    value = source.take(name)
    if isinstance(value, int | float) and 0 <= value < 1:
        made.put("data.eval_fraction", value)
    elif value is not None:
        made.lose(source, name, "a recipe holds out a share of the data: set data.eval_fraction below 1")
