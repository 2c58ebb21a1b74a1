"""Checkpoints of a peft model that trains one adapter: `adapter_model.safetensors` and `adapter_config.json`, which
`PeftModel.from_pretrained` reads.

The frozen weights of the base are not written. A fingerprint of each (dtype, shape, checksum) is in the checkpoint, so
that an adapter is never loaded onto another base. Buffers outside of the adapter (running statistics) are saved too.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.files import Files
from windlass.checkpoint.names import canonical_names, counted
from windlass.checkpoint.tensor_file import open_tensors, read_held
from windlass.checkpoint.weights import misfits
from windlass.core.errors import CheckpointError
from windlass.core.module_state import full_state_dict, state_was_loaded, values_of
from windlass.core.optional import require
from windlass.core.tensors import address, dtype_name
from windlass.core.types import State
from windlass.dist.sharded import local, whole

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
BASE_STATE = "adapter_base"  # the shared part with the fingerprint and the buffers
_PROMPTS = "prompt_embeddings"  # peft's name for learnt prompts in the file
_ROWS = frozenset({"PROMPT_TUNING", "PREFIX_TUNING"})  # kinds of prompts that may be rows of an embedding
_CHUNK = 1 << 22  # elements that are summed at once: 32 MiB as 64-bit integers
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def peft_library(purpose: str) -> Any:
    """The package peft. `purpose` completes the sentence "peft is needed to ..."."""
    return require("peft", purpose)


def base_part(name: str) -> str:
    """The shared part with the fingerprint and the buffers of the model `name`."""
    return BASE_STATE if name == "model" else f"{BASE_STATE}_{name}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """The one adapter that a model trains."""

    model: nn.Module  # the peft model
    name: str  # what peft calls it ("default")
    names: Mapping[str, str]  # name in the model's state dict -> name in `adapter_model.safetensors`
    buffers: frozenset[str]  # names of saved buffers that are not the adapter's
    base: str | None  # how its configuration names the base: a folder by its whole path

    def weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The content of `adapter_model.safetensors`, from a state dict of the model. Tied tensors are copied, because
        peft does not read the map of ties.
        """
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, stored in self.names.items():
            tensor = state[name].detach()
            found[stored] = tensor.clone() if address(tensor) in seen else tensor
            seen.add(address(tensor))
        return found

    def gathered(self) -> dict[str, Tensor]:
        """The adapter's tensors and the buffers by their names in the model, whole and on the host of every rank.
        Collective if they are sharded.
        """
        state = values_of(self.model)
        return {name: whole(state[name]).detach().cpu() for name in (*self.names, *sorted(self.buffers))}

    def fingerprint(self) -> dict[str, list[Any]]:
        """Dtype, shape and checksum of every frozen weight, by canonical name. Collective if they are sharded; one at a
        time is gathered.
        """
        # Without a trained weight's further names, under which peft does not save it.
        untrained = {n for n, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        frozen = {
            name: tensor
            for name, tensor in values_of(self.model).items()
            if name not in self.names and name in untrained
        }
        short = canonical_names(frozen)
        return {
            short[name]: [dtype_name(tensor.dtype), list(tensor.shape), checksum(tensor)]
            for name, tensor in frozen.items()
        }

    def base_state(self, fingerprint: Mapping[str, list[Any]], state: Mapping[str, Tensor]) -> State:
        """The shared part `BASE_STATE`, from a state dict of the model."""
        return {
            "weights": dict(fingerprint),
            "buffers": {name: state[name].detach() for name in sorted(self.buffers)},
        }

    def save_config(self, folder: Path) -> None:
        """Write `adapter_config.json` for inference, as peft writes it."""
        model: Any = self.model
        config = copy.copy(model.peft_config[self.name])
        config.base_model_name_or_path = self.base
        if config.task_type is None:
            kind = type(model.get_base_model())
            config.auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.inference_mode = True
        config.save_pretrained(str(folder))


def _base_of(model: Any, config: Any) -> str | None:
    """What names the base. A folder by its whole path: the script may change its working directory before it saves, and
    the adapter may be merged in another one.
    """
    named = config.base_model_name_or_path or getattr(model.get_base_model(), "name_or_path", None) or None
    return os.path.abspath(named) if named and os.path.isdir(named) else named


def find_adapter(model: nn.Module) -> Adapter | None:
    """The adapter that `model` trains; None if it is not a peft model, trains other weights too, or peft saves other
    tensors than are trained (prompts from an encoder with layers). Whole weights are saved then.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return None
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    state = full_state_dict(model)
    configs: Any = model.peft_config
    for name in configs:
        names = _names_in_file(model, name, state)
        if names and trained and trained <= {id(state[inside]) for inside in names}:
            buffers = dict(model.named_buffers(remove_duplicate=False)).keys() & state.keys()
            return Adapter(
                model, name, names, frozenset(buffers - names.keys()), _base_of(model, configs[name])
            )
    return None


def _names_in_file(model: nn.Module, adapter: str, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name in the model -> peft's name for it; empty if peft saves other tensors than the model's own."""
    peft = peft_library("save a model's adapters")
    peft_model: Any = model
    if peft_model.peft_config[adapter].is_prompt_learning:
        return _names_of_prompts(peft_model, adapter, state)
    picked = peft.get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter)
    inside = {id(tensor): name for name, tensor in state.items()}
    if not all(id(tensor) in inside for tensor in picked.values()):
        return {}
    # Of a weight that is saved under two names, peft reads the first: a whole head is saved as an embedding too if rows
    # were added to it.
    return {inside[id(tensor)]: stored for stored, tensor in reversed(picked.items())}


def _names_of_prompts(model: Any, adapter: str, state: Mapping[str, Tensor]) -> dict[str, str]:
    """See `_names_in_file`. Of learnt prompts peft saves what their encoder returns, which it computes with whole
    weights. Those are the rows of an embedding if the encoder has no other weights.
    """
    name = f"prompt_encoder.{adapter}.embedding.weight"
    kind = str(getattr(model.peft_config[adapter].peft_type, "value", None))
    trained = [inside for inside, tensor in state.items() if tensor.requires_grad]
    own = [inside for inside, _ in model.prompt_encoder[adapter].named_parameters()]
    return {name: _PROMPTS} if kind in _ROWS and (trained, own) == ([name], ["embedding.weight"]) else {}


def checksum(tensor: Tensor) -> int:
    """A sum of 64-bit integers over the bits of `tensor` in order, equal on all devices and layouts; 0 on the meta
    device. One host sync. Collective for a sharded tensor. A tensor that is made of others (few bits and their scales)
    has the sum of theirs.
    """
    flat = whole(tensor).detach()
    if hasattr(flat, "__tensor_flatten__"):
        return sum(checksum(getattr(flat, name)) for name in flat.__tensor_flatten__()[0]) % (1 << 63)
    if flat.is_meta or flat.element_size() not in _BITS:
        return 0
    flat = flat.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].contiguous().view(_BITS[flat.element_size()]).to(torch.int64)
        place = torch.arange(start, start + bits.numel(), device=flat.device)
        # Overflows wrap alike on all devices; odd factors lose no bit. This one is the multiplier of Knuth's MMIX
        # generator. The shift brings high bits down, because a product carries differences upwards only.
        mixed = (bits + place) * 0x5851F42D4C957F2D
        total += (mixed.bitwise_xor(mixed >> 29) * (2 * place + 1)).sum()
    return int(total)


def load_adapter(folder: Path, model: nn.Module, base: State | None, *, files: Files | None = None) -> None:
    """Copy `folder/adapter_model.safetensors` into the adapter of `model`, in place, once everything is checked. Of a
    sharded parameter every rank reads its part. Collective if parameters are sharded and `base` is given. `base`: the
    part `BASE_STATE` of the checkpoint; None does not check the base.
    """
    path = folder / ADAPTER_WEIGHTS
    adapter = find_adapter(model)
    if adapter is None:
        raise CheckpointError(
            f"{path} holds adapters alone, and this model does not train one: put the same adapter on the model with "
            "peft (get_peft_model) before it is loaded"
        )
    state = values_of(model)
    with open_tensors(path, files or Files()) as file:
        wanted = {stored: tuple(state[name].shape) for name, stored in adapter.names.items()}
        if problems := misfits(file, wanted, {name: name for name in wanted}, "adapter"):
            raise CheckpointError(f"{path} does not fit this model's adapter: {problems}")
        if base is not None:
            _check_base(folder, base, adapter, state)
        with torch.no_grad():
            for name, stored in adapter.names.items():
                local(state[name]).copy_(read_held(file, stored, state[name]))
    state_was_loaded(model)
    with torch.no_grad():
        for name, value in (base or {"buffers": {}})["buffers"].items():
            state[name].copy_(value)


def _check_base(folder: Path, base: State, adapter: Adapter, state: Mapping[str, Tensor]) -> None:
    try:
        saved, buffers = dict(base["weights"]), dict(base["buffers"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{folder / BASE_STATE}.json is not what was saved: it names no weights"
        ) from None
    here = adapter.fingerprint()
    differing = [name for name in here if name in saved and here[name] != saved[name]]
    problems = counted(
        ((name for name in saved if name not in here), "are not in the model"),
        ((name for name in here if name not in saved), "were not there when it was saved"),
        ((name for name in differing if here[name][:2] != saved[name][:2]), "have another shape or dtype"),
        ((name for name in differing if here[name][:2] == saved[name][:2]), "have other values"),
        ((name for name in buffers if name not in adapter.buffers), "are saved buffers that the model lacks"),
        (
            (name for name in sorted(adapter.buffers) if name not in buffers),
            "are buffers that were not saved",
        ),
        (
            # They would be filled by repeating what was saved, if that is smaller.
            (name for name in adapter.buffers & buffers.keys() if buffers[name].shape != state[name].shape),
            "are buffers of another shape",
        ),
    )
    if problems:
        raise CheckpointError(
            f"{folder} holds adapters that were trained on another base model than this one ({problems}). "
            "Load the base that the run began with"
        )
