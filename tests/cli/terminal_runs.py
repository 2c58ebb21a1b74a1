"""Trainings that are typed at a terminal, by the name of what happens in them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from typing import Any

from tests.trainer.small import Net, rows

from windlass import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments


class Talks(TrainerCallback):
    """Whatever a script and its libraries write while a bar is drawn."""

    def __init__(self, what: str) -> None:
        self.what = what
        # As of a library that was imported before: it writes to the stream, not to `sys.stderr`.
        self.before = logging.StreamHandler(sys.stderr)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step == 3:
            warnings.warn("something is deprecated", FutureWarning, stacklevel=1)
            print("printed", "in", "words")
            # One line: a second one, before the rows are drawn again, would be written over them.
            if os.environ.get("RANK", "0") == "0":
                self.before.emit(logging.makeLogRecord({"msg": "a library's record"}))
        if step == 6 and self.what == "error":
            raise RuntimeError("the sixth update")
        if step == 6 and self.what == "exit":
            sys.exit(7)
        if step == 6 and self.what == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)


def main(what: str) -> None:
    args = TrainingArguments(
        "run",
        max_steps=100_000 if what == "endless" else 12,
        per_device_train_batch_size=4,
        logging_steps=50 if what == "endless" else 3,
        eval_strategy="no" if what == "endless" else "steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=100_000 if what == "endless" else 4,
        load_best_model_at_end=what == "early",
        metric_for_best_model="constant" if what == "early" else None,
        disable_tqdm=what == "plain",
        use_cpu=True,
        log_level="warning",
    )
    measure = (lambda _: {"constant": 1.0}) if what == "early" else None
    callbacks = [EarlyStoppingCallback(1)] if what == "early" else []
    data = rows(48)
    trainer = Trainer(
        Net(),
        args,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=measure,
        callbacks=[Talks(what), *callbacks],
    )
    if what == "evaluate":
        trainer.evaluate()
        trainer.predict(data)
        return
    trainer.train(resume_from_checkpoint="auto" if what == "resumed" else None)
    print("evaluated", sorted(trainer.evaluate())[0])
    print(f"ended at step {trainer.state.global_step}")


if __name__ == "__main__":
    main(sys.argv[1])
