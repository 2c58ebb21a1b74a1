"""The memory of one process in training, from a model's configuration alone: the plan of such a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from windlass.checkpoint.adapters import peft_library
from windlass.config.arguments import TrainingArguments
from windlass.config.refusal import refuse
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.finetuning.peft_adapters import add_adapter
from windlass.forecast.forecast import Forecast
from windlass.forecast.meter import TEMPORARY, WEIGHTS
from windlass.forecast.tracing import trace_of
from windlass.trainer.trainer import Trainer

# Bits of a weight of a linear layer: 4 with a scale in fp32 for 64 of them, or 8.
_FEW_BITS = {"nf4": 4.5, "fp4": 4.5, "int8": 8.0}
TOGETHER = "together"


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and how.

    Attributes:
        batch, length: samples of a process in a forward, and tokens of each.
        dtype, precision: of the weights, and of autocast ("no" for none).
        lora_r: rank of adapters on all linear layers; None trains all weights.
        quantization: of the base below adapters.
        sharding: what is divided among `processes`: none; grad: all, and weights are whole between a forward and its
            backward; full: all.
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
    def weights(self) -> torch.dtype:
        """The dtype of the weights; that of other 16 bits takes the same memory, and trains on any device."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def matrices(self) -> torch.dtype:
        """The dtype of matrix products."""
        return self.weights if self.precision == "no" else torch.bfloat16


@dataclass(slots=True)
class _Packed:
    """The linear layers of a base that are stored in few bits: elements of all, and of the largest."""

    elements: int = 0
    largest: int = 0

    def add(self, model: nn.Module) -> None:
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()  # kept as it is
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and layer is not head:
                self.elements += layer.weight.numel()
                self.largest = max(self.largest, layer.weight.numel())


class MemoryRow(NamedTuple):
    """Bytes of one kind of memory at the peak of an update, and at most."""

    kind: str
    peak: float
    most: float


def training_rows(build: Callable[[], nn.Module], training: Training) -> list[MemoryRow]:
    """Return the kinds of memory of a process, and their sum. Raises ModelError if the model cannot be run on token ids
    alone.

    Args:
        build: makes the model; called where parameters take no memory.
    """
    training.check()
    packed = _Packed()

    def start() -> None:
        model = build().to(training.weights)
        if training.quantization is not None:
            packed.add(model)
        if training.lora_r is not None:
            lora = peft_library("count an adapter").LoraConfig(r=training.lora_r, target_modules="all-linear")
            model = add_adapter(model, lora, [])
        ids = torch.zeros(training.length, dtype=torch.long)
        rows = [{"input_ids": ids, "labels": ids}] * (training.batch * training.processes)
        Trainer(model, _arguments(training), train_dataset=rows).train()

    try:
        forecast = Forecast(trace_of(start, training.processes), None)
    except ConfigError:
        raise
    except (ModelError, AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"the model cannot be run on input_ids and labels of these sizes: {reason}"
        ) from error
    changes: Counter[str] = Counter()
    if training.quantization is not None:
        # Planned in the dtype of the weights; a layer is unpacked while it is computed.
        bits = 8 * training.weights.itemsize - _FEW_BITS[training.quantization]
        changes[WEIGHTS] = -int(packed.elements * bits / 8)
        changes[TEMPORARY] = packed.largest * training.matrices.itemsize
    rows = [
        MemoryRow(kind, now + changes[kind], most + changes[kind])
        for kind, (now, most) in forecast.kinds().items()
    ]
    return [*rows, MemoryRow(TOGETHER, sum(row.peak for row in rows), forecast.peak + changes.total())]


def _arguments(training: Training) -> TrainingArguments:
    return TrainingArguments(
        "unused",  # nothing is written
        per_device_train_batch_size=training.batch,
        max_steps=1,
        bf16=training.precision != "no",
        gradient_checkpointing=training.recompute,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        fsdp=True if training.sharding != "none" else None,
        fsdp_config={"reshard_after_forward": False} if training.sharding == "grad" else None,
    )
