"""The memory of one process in training: weights, gradients and optimizer state by count, activations by a forward
without data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from windlass.checkpoint.adapters import peft_library
from windlass.config.refusal import refuse
from windlass.core.errors import ModelError, Problem
from windlass.finetuning.peft_adapters import add_adapter
from windlass.transforms.recompute import apply_recompute

# Bits of a weight of a linear layer: 4 with a scale in fp32 for 64 of them, or 8.
_FEW_BITS = {"nf4": 4.5, "fp4": 4.5, "int8": 8.0}


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and how.

    Attributes:
        batch, length: samples of a process in a forward, and tokens of each.
        dtype, precision: of the weights, and of autocast ("no" for none).
        lora_r: rank of adapters on all linear layers; None trains all weights.
        quantization: of the base below adapters.
        sharding: what is divided among `processes`: none; grad: gradients and optimizer state; full: the weights too.
    """

    batch: int
    length: int
    dtype: str = "float32"
    precision: str = "no"
    lora_r: int | None = None
    quantization: str | None = None
    recompute: bool = False
    processes: int = 1
    sharding: str = "none"

    def check(self) -> None:
        """Raise ConfigError for values that do not fit each other."""
        problems = [
            Problem(f"--{name}", value, "must be at least 1")
            for name, value in (
                ("batch_size", self.batch),
                ("length", self.length),
                ("num_processes", self.processes),
            )
            if value < 1
        ]
        if self.lora_r is not None and self.lora_r < 1:
            problems.append(Problem("--lora_r", self.lora_r, "must be at least 1"))
        if self.quantization is not None and self.lora_r is None:
            fix = "weights of few bits are not trained themselves; set --lora_r too"
            problems.append(Problem("--quantization", self.quantization, fix))
        if self.sharding != "none" and self.processes == 1:
            problems.append(
                Problem("--sharding", self.sharding, "divides among processes; set --num_processes too")
            )
        refuse(problems)

    @property
    def makes_copies(self) -> bool:
        """Return True if autocast copies weights. FSDP gathers in the dtype of the matrix products, and layers in few
        bits make no copies that are kept.
        """
        is_other = self.compute_dtype != getattr(torch, self.dtype)
        return is_other and self.sharding != "full" and self.quantization is None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        named: torch.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            self.precision, getattr(torch, self.dtype)
        )
        return named


def training_rows(model: nn.Module, training: Training) -> list[tuple[str, float]]:
    """Return the bytes of each part, and their sum. `model` is on the meta device, and is changed. Raises ModelError if
    the model cannot be run on token ids alone.
    """
    training.check()
    if training.lora_r is not None:
        lora = peft_library("count an adapter").LoraConfig(r=training.lora_r, target_modules="all-linear")
        model = add_adapter(model, lora, [])
    if training.recompute:
        apply_recompute(model)
    shards = training.processes if training.sharding != "none" else 1
    bits = dict(_weight_bits(model, training))
    weights = sum(bits[name] * parameter.numel() / 8 for name, parameter in model.named_parameters())
    trained = sum(
        bits[name] * parameter.numel() / 8
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    matrices = _matrices(model)
    rows = {
        "weights": weights / (shards if training.sharding == "full" else 1),
        "gradients": trained / shards,
        "Adam's two moments": 2 * trained / shards,
        "activations": float(_saved_bytes(model, training, matrices)),
    }
    if training.makes_copies:
        # Autocast keeps those of trained weights until the forward ends; others are kept with the activations.
        kept = [
            p for p in model.parameters() if id(p) in matrices and (p.requires_grad or not training.recompute)
        ]
        rows["16-bit copies of weights"] = 2.0 * sum(parameter.numel() for parameter in kept)
    if training.sharding == "full":
        rows["two gathered layers"] = 2.0 * _largest_block(model) * training.compute_dtype.itemsize
    return [*rows.items(), ("sum, of each process", sum(rows.values()))]


def _weight_bits(model: nn.Module, training: Training) -> Iterator[tuple[str, float]]:
    """Yield the bits of an element of each parameter: adapters are in float32, as they are trained."""
    stored = 8.0 * getattr(torch, training.dtype).itemsize
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()  # kept as it is
    linear = {
        id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    for name, parameter in model.named_parameters():
        if training.lora_r is not None and parameter.requires_grad:
            yield name, 32.0
        elif training.quantization is not None and id(parameter) in linear:
            yield name, _FEW_BITS[training.quantization]
        else:
            yield name, stored


def _matrices(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that autocast casts: matrices, but not those of embeddings."""
    layers = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = (p for layer in layers for p in layer.parameters(recurse=False) if p.ndim >= 2)
    return {id(parameter) for parameter in found} - looked_up


def _largest_block(model: nn.Module) -> int:
    """Return the parameters of the largest module in a list, such as a decoder layer."""
    blocks = [block for found in model.modules() if isinstance(found, nn.ModuleList) for block in found]
    return max((sum(parameter.numel() for parameter in block.parameters()) for block in blocks), default=0)


def _saved_bytes(model: nn.Module, training: Training, matrices: set[int]) -> int:
    """Return the bytes that autograd keeps between forward and backward, weights aside: `matrices` are in the dtype of
    the products, so that autocast copies none.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, torch.Tensor] = {}
    model.train()
    with FakeTensorMode():
        values = {}
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            values[name] = torch.empty(value.shape, dtype=_dtype(value, training, matrices))
            values[name].requires_grad = value.requires_grad
        own = {_storage(value) for value in values.values()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if _storage(tensor) not in own:
                kept[_storage(tensor)] = tensor
            return tensor

        ids = torch.zeros(training.batch, training.length, dtype=torch.long)
        autocast = torch.autocast("cpu", training.compute_dtype, enabled=training.precision != "no")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast, _explained():
            torch.func.functional_call(model, values, kwargs={"input_ids": ids, "labels": ids})
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _dtype(value: torch.Tensor, training: Training, matrices: set[int]) -> torch.dtype:
    if not value.is_floating_point():
        return value.dtype
    if training.lora_r is not None and value.requires_grad:
        return torch.float32  # an adapter
    chosen: torch.dtype = training.compute_dtype if id(value) in matrices else getattr(torch, training.dtype)
    return chosen


def _storage(tensor: torch.Tensor) -> int:
    reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(reference.cdata)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"the model cannot be run on input_ids and labels of these sizes: {reason}"
        ) from error
