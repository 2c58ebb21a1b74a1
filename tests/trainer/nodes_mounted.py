"""Run once on each of two machines, which see folders of their own under one path: a run with a best model, continued.

Usage: nodes_mounted.py OUTPUT_DIR, with the variables of a launcher.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.trainer.resume_cases import Case, run

from windlass.checkpoint import nodes

nodes.WAITS = (0.01, 0.05)  # these file systems show at once what others wrote
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "num_train_epochs": 1,
    "save_total_limit": 1,
}


def main() -> None:
    folder = Path(sys.argv[1])
    run(folder, Case(BEST), max_steps=2)
    trainer = run(folder, Case(BEST), resume=True, max_steps=4, save_on_each_node=True)
    trainer.save_model()
    state = trainer.state
    assert state.global_step == 4
    assert Path(str(state.best_model_checkpoint)).parent == folder
    assert (folder / "checkpoint-4" / "manifest.json").is_file()


if __name__ == "__main__":
    main()
