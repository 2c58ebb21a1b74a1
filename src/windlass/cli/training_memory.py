"""The memory of one process in training, of a model's configuration alone: the plan of a run on made-up tokens.

`Training` is read for the help of a command, so torch is imported within functions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.core.errors import Problem, refuse

if TYPE_CHECKING:
    from windlass.forecast.forecast import Forecast

_UPDATES = 2


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and how.

    Attributes:
        batch_size, length: samples of a process in a forward, and tokens of each.
        weights, precision: dtype of the weights, and of autocast ("no" for none).
        lora_r: rank of adapters on all linear layers; None trains all weights.
        quantization: of the base below adapters.
        sharding: what is divided among `num_processes`: none; grad: all, but weights are whole from their first use in
            the forward to the end of the backward; full: all, as FSDP does.
    """

    batch_size: int
    length: int = 1024
    weights: str = "float32"
    precision: str = "no"
    lora_r: int | None = None
    quantization: str | None = None
    recompute: bool = False
    num_processes: int = 1
    sharding: str = "none"

    def check(self) -> None:
        """Raise ConfigError for values that do not fit each other."""
        counts = {name: getattr(self, name) for name in ("batch_size", "length", "num_processes", "lora_r")}
        problems = [
            Problem(f"--{name}", value, "must be at least 1")
            for name, value in counts.items()
            if value is not None and value < 1
        ]
        if self.quantization is not None and self.lora_r is None:
            fix = "weights of few bits are not trained themselves; set --lora_r too"
            problems.append(Problem("--quantization", self.quantization, fix))
        if self.sharding != "none" and self.num_processes == 1:
            problems.append(
                Problem("--sharding", self.sharding, "divides among processes; set --num_processes too")
            )
        refuse(problems)


def plan_training(build: Callable[[], Any], training: Training) -> Forecast:
    """The forecast of a training with Adam on a device. `build` makes the model, whose weights get no memory. Raises
    ConfigError for what a run would refuse, and ModelError if the model cannot be run on token ids alone.
    """
    from windlass.forecast.forecast import Forecast
    from windlass.forecast.tracing import trace_of

    training.check()
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_of(
            lambda: _trainer(build(), training, folder).train(), training.num_processes, on_device=True
        )
    return Forecast(trace)


def _trainer(model: Any, training: Training, folder: str) -> Any:
    import torch

    from windlass.config.arguments import TrainingArguments
    from windlass.trainer.trainer import Trainer

    args = TrainingArguments(
        folder,
        max_steps=_UPDATES,
        per_device_train_batch_size=training.batch_size,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        activation_checkpointing=training.recompute,
        fsdp=training.sharding != "none",
        fsdp_config={"reshard_after_forward": training.sharding == "full"}
        if training.sharding != "none"
        else None,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        log_level="warning",
    )
    row = dict.fromkeys(("input_ids", "labels"), torch.zeros(training.length, dtype=torch.long))
    rows = [row] * training.batch_size * training.num_processes * _UPDATES
    return Trainer(_prepared(model, training), args, train_dataset=rows)


def _prepared(model: Any, training: Training) -> Any:
    import torch

    from windlass.checkpoint.adapters import peft_library
    from windlass.finetuning.base_model import few_bits
    from windlass.finetuning.peft_adapters import add_adapter

    dtype = getattr(torch, training.weights)
    model = model.to(dtype)
    if training.quantization is not None:
        from windlass.forecast.packed_layers import pack

        compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(training.precision, dtype)
        pack(model, few_bits(training.quantization, compute))
    if training.lora_r is None:
        return model
    lora = peft_library("count an adapter").LoraConfig(r=training.lora_r, target_modules="all-linear")
    return add_adapter(model, lora, [])
