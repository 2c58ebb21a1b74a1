"""A script that knows nothing of DeepSpeed; its launcher sets it. Writes what it came to as JSON. Args: folder, and
a configuration of DeepSpeed if the launcher sets none, or "language" to train a language model in bf16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.zero.runs import RANK, language_trainer, told, trainer


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # of DeepSpeed's launcher
    folder, others = Path(words[0]), words[1:]
    if others == ["language"]:
        made = language_trainer(folder, stage=-1, steps=4)
    else:
        own = {"deepspeed": others[0]} if others else {}
        made = trainer(folder, stage=-1, **own)
    made.train()
    found = {**told(made), "deepspeed": made.is_deepspeed_enabled}
    if RANK == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
