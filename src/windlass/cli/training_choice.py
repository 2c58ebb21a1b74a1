"""A training whose memory is estimated: what is trained, and how."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.core.errors import Problem, refuse


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
