"""What a long `log_history` costs a save: processor time of the training thread, and what is written.

python benchmarks/log_history.py [rows ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from windlass import Trainer, TrainerCallback, TrainingArguments
from windlass.core.events import TrainerState

SAVES = 3


class Logging(TrainerCallback):
    """Begins with a long history and adds a row at each update."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        state.log_history += [
            {
                "loss": 2 + 1 / step,
                "grad_norm": 1 / step,
                "learning_rate": 5e-5,
                "epoch": step / 7,
                "step": step,
            }
            for step in range(1, self._rows + 1)
        ]

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        state.log_history.append({"loss": 1.5, "step": state.global_step})


def main() -> None:
    for rows in [int(word) for word in sys.argv[1:]] or [100_000, 1_000_000]:
        with tempfile.TemporaryDirectory() as name:
            measure(Path(name), rows)


def measure(folder: Path, rows: int) -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    computed = []

    class Timed(Trainer):
        def _agreed_content(self, step: int) -> Any:
            began = time.thread_time()
            try:
                return super()._agreed_content(step)
            finally:
                computed.append(time.thread_time() - began)

    data = [{"x": torch.randn(4), "labels": number % 2} for number in range(64)]
    arguments = TrainingArguments(
        str(folder), max_steps=4 * SAVES, save_steps=4, logging_strategy="no", report_to="none", disable_tqdm=True,
        save_total_limit=1, use_cpu=True, log_level="error", metric_for_best_model=None,
    )  # fmt: skip
    Timed(Net(), arguments, train_dataset=data, callbacks=[Logging(rows)]).train()
    last = folder / f"checkpoint-{4 * SAVES}"
    state = (last / "trainer_state.json").stat().st_size
    older = [path.stat() for path in last.glob("log_history/*")]
    size = sum(status.st_size for status in older)
    times = ", ".join(f"{1000 * seconds:.0f}" for seconds in computed)
    print(
        f"{rows:,} rows: the training thread computes {times} ms for {SAVES} saves; trainer_state.json "
        f"{state / 1e6:.1f} MB, {len(older)} segments of {size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
