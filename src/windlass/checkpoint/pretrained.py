"""How transformers lays the weights of its models out in files.

`save_pretrained` leaves out tied and derived weights, and writes the rest under the names of the Hub. Where those
differ from the names in memory (mixtures of experts, vision-language models), tensors are renamed, split, joined and
permuted, which loses no bit. Its own functions make the files of a checkpoint here, and the model's tensors of such
files.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.codec import is_one_tensor
from windlass.checkpoint.names import canonical_names
from windlass.checkpoint.tensor_file import Shaped, TensorSource
from windlass.core.logs import get_logger, warn_once
from windlass.core.tensors import dtype_name
from windlass.dist.sharded import Part

_logger = get_logger(__name__)


def is_pretrained(model: nn.Module) -> bool:
    """Return True for a model of transformers whose weights are whole: not quantized, no adapter added by itself."""
    base = _pretrained_class()
    if base is None or not isinstance(model, base):
        return False
    return getattr(model, "hf_quantizer", None) is None and not getattr(
        model, "_hf_peft_config_loaded", False
    )


def overrides_saving(model: nn.Module) -> bool:
    """Return True if a model of transformers has a `save_pretrained` of its own."""
    if not is_pretrained(model):
        return False
    own: Any = type(model)
    return "save_pretrained" in vars(model) or own.save_pretrained is not _pretrained_class().save_pretrained


def file_layout(model: nn.Module) -> FileLayout | None:
    """How the weights of a model are laid out in files; None if they are written as they are in memory."""
    return FileLayout(model) if is_pretrained(model) else None


class FileLayout:
    """The weights of one model of transformers, as `save_pretrained` writes them."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._is_invertible: bool | None = None

    def select(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a state dict that are written, by canonical names: tied ones once, derived ones not at all."""
        names = canonical_names(state)
        ignored = ignored_names(self._model)
        kept = {names[name]: value for name, value in state.items() if names[name] not in ignored}
        plain = {name: value for name, value in kept.items() if is_one_tensor(value)}
        modeling = _module("modeling_utils")
        if not hasattr(modeling, "remove_tied_weights_from_state_dict"):
            return kept
        try:
            untied = modeling.remove_tied_weights_from_state_dict(dict(plain), self._model)
        except RuntimeError:
            return kept  # ties that the model does not declare: the file's header maps their names
        return {
            name: untied.get(name, value)
            for name, value in kept.items()
            if name in untied or name not in plain
        }

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of `select` as they are written, by their names in the file. Where tensors are split or joined,
        these are copies.
        """
        if not self._can_be_loaded(state):
            return dict(state)
        plain = {name: value.detach() for name, value in state.items() if is_one_tensor(value)}
        written: dict[str, Tensor] = _core_loading().revert_weight_conversion(self._model, plain)
        return {**written, **{name: value for name, value in state.items() if name not in plain}}

    def _can_be_loaded(self, state: Mapping[str, Tensor]) -> bool:
        """Return True if what would be written gives the same names and shapes when it is loaded."""
        if self._is_invertible is None:
            shaped = {name: _shaped(value) for name, value in state.items() if is_one_tensor(value)}
            try:
                self._is_invertible = self._comes_back(shaped)
            except Exception as error:  # of a conversion that does not fit this model
                self._is_invertible = False
                _logger.debug("converting the names of weights failed", exc_info=error)
            if not self._is_invertible:
                warn_once(
                    _logger,
                    f"{type(self._model).__name__} is saved with the names that its weights have in "
                    "memory: what save_pretrained writes for it cannot be loaded into it again",
                )
        return self._is_invertible

    def _comes_back(self, shaped: Mapping[str, Shaped]) -> bool:
        state = {name: _empty(one) for name, one in shaped.items()}
        written = _core_loading().revert_weight_conversion(self._model, state)
        groups = _find_groups(self._model, list(written), shaped.keys())
        return groups is not None and _shapes_of(groups, written.__getitem__) == dict(shaped)


def ignored_names(model: nn.Module) -> frozenset[str]:
    """Names of weights that a model's files never hold, because the model makes them itself. Trained ones are held."""
    named = getattr(model, "_keys_to_ignore_on_save", None) if is_pretrained(model) else None
    if not named:
        return frozenset()
    trained = (name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)
    return frozenset(named) - set(canonical_names(trained).values())


def has_configurations(model: nn.Module) -> bool:
    """Return True if `write_configurations` writes a file."""
    return is_pretrained(model) or bool(_savable_configurations(model))


def _savable_configurations(model: nn.Module) -> list[Any]:
    parts = [getattr(model, name, None) for name in ("config", "generation_config")]
    return [part for part in parts if hasattr(part, "save_pretrained")]


def write_configurations(model: nn.Module, folder: Path) -> None:
    """Write the configurations of a model of transformers, with its class and dtype, and the code of a class that
    `register_for_auto_class` publishes; of another model those of its configurations that can be saved.
    """
    own: Any = model
    if not is_pretrained(model):
        # Copies: those of the script stay as it made them.
        for part in map(copy.copy, _savable_configurations(model)):
            if getattr(part, "architectures", False) is None:
                part.architectures = [type(model).__name__]
            part.save_pretrained(str(folder))
        return
    config = copy.deepcopy(own.config)
    config.dtype = dtype_name(own.dtype)
    # FSDP2 puts its name before that of the class.
    config.architectures = [type(own).__name__.removeprefix("FSDP")]
    if own.is_remote_code():
        _module("dynamic_module_utils").custom_object_save(own, str(folder), config=config)
    config.save_pretrained(str(folder))
    if own.can_generate():
        own.generation_config.save_pretrained(str(folder))


# --- reading ----------------------------------------------------------------------------------------------------------


def by_names_in_memory(source: TensorSource, wanted: AbstractSet[str], model: nn.Module) -> TensorSource:
    """The tensors of a model's files under their names in memory; `source` itself if it has those or others entirely.
    `wanted`: the canonical names of the model's tensors.
    """
    if not is_pretrained(model) or set(source.names) <= wanted:
        return source
    groups = _find_groups(model, source.names, wanted)
    return source if groups is None else ConvertedTensors(source, groups)


class ConvertedTensors(TensorSource):
    """Tensors that are made from those of files when they are read."""

    def __init__(self, source: TensorSource, groups: Sequence[_Group]) -> None:
        self._source = source
        self._places: dict[str, _Group] = {}
        self._last: tuple[_Group, dict[str, Tensor]] | None = None
        shaped: dict[str, Shaped] = {}
        for group in groups:
            found = _shapes_of([group], lambda name: _empty(source.shaped(name)))
            shaped |= found
            self._places |= dict.fromkeys(found, group)
        super().__init__(shaped)

    def read(self, name: str, wanted: Part | None = None) -> Tensor:
        group = self._places[name]
        if group.converter is None:
            return self._source.read(group.members[0][0], wanted)
        if self._last is None or self._last[0] is not group:  # a group may make several tensors
            self._last = None
            self._last = group, group.convert(self._source.read)
        tensor = self._last[1][name]
        return tensor if wanted is None else wanted.of(tensor)


@dataclass(slots=True, eq=False)
class _Group:
    """Tensors of files that are converted together."""

    name: str  # in memory, of the first tensor that they become
    model: Any
    converter: Any = None  # of transformers; None: one tensor, which has another name at most
    # Name in the file, and the pattern of the converter that it matched
    members: list[tuple[str, str | None]] = field(default_factory=list)

    def convert(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The tensors in memory, by name."""
        if self.converter is None:
            return {self.name: read(self.members[0][0])}
        # A converter keeps the tensors that are added to it until it has converted them.
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.members:
            converter.add_tensor(self.name, name, pattern, functools.partial(read, name))
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _find_groups(model: Any, names: Sequence[str], wanted: AbstractSet[str]) -> list[_Group] | None:
    """What becomes of the tensors of a file, by the first of the model's mappings by which each becomes one of
    `wanted`; None if there is none.
    """
    for mapping in _mappings(model):
        groups = _grouped(model, names, wanted, mapping)
        if all(group.name in wanted for group in groups):
            return groups
    return None


def _grouped(
    model: Any, names: Sequence[str], wanted: AbstractSet[str], mapping: Sequence[Any]
) -> list[_Group]:
    loading = _core_loading()
    mapping = copy.deepcopy(list(mapping))  # some note what they matched
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    groups: dict[str, _Group] = {}
    # As transformers does when it loads: tensors of a group are joined in this order, expert 10 after expert 9.
    for name in sorted(names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        converter = None if pattern is None else by_pattern[pattern]
        groups.setdefault(target, _Group(target, model, converter)).members.append((name, pattern))
    return list(groups.values())


def _mappings(model: Any) -> list[list[Any]]:
    """The conversions that it may have been saved with: those it was loaded with, and those of its class."""
    of_class = _module("conversion_mapping").get_model_conversion_mapping(model, add_legacy=False) or []
    plain = [one for one in of_class if not isinstance(one, _core_loading().PrefixChange)]
    loaded_with = getattr(model, "_weight_conversions", None) or []
    return [list(loaded_with), plain, list(of_class)]


def _shapes_of(groups: Sequence[_Group], read: Callable[[str], Tensor]) -> dict[str, Shaped]:
    return {name: _shaped(tensor) for group in groups for name, tensor in group.convert(read).items()}


def _shaped(tensor: Tensor) -> Shaped:
    return Shaped(tensor.dtype, tuple(tensor.shape))


def _empty(shaped: Shaped) -> Tensor:
    return torch.empty(shaped.shape, dtype=shaped.dtype, device="meta")


# --- transformers -----------------------------------------------------------------------------------------------------


def _pretrained_class() -> Any:
    """`PreTrainedModel`, if anything can be one: None if its module was not imported."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)


def _core_loading() -> ModuleType:
    """The module that converts names."""
    return _module("core_model_loading")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.{name}")
