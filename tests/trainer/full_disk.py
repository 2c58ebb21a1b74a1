"""Run in a mount namespace of its own: runs whose disk takes nothing for a while, and then has room again."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from tests.trainer.memory_cases import flat, hungry, trainer_for

from windlass import TrainerCallback

DISK_BYTES, FILE_BYTES = 16 << 20, 2048


class Trouble(TrainerCallback):
    """Begins before the save of the second update and ends after that of the fourth."""

    def __init__(self, disk: Path, finish_saving: Callable[[], None]) -> None:
        self.ballast, self.finish_saving = disk / "ballast", finish_saving

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (1, 4):
            self.finish_saving()  # what is under way has the disk as it was
            self.begin() if state.global_step == 1 else self.end()


class Full(Trouble):
    """Something else takes the whole disk."""

    def begin(self) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    def end(self) -> None:
        self.ballast.unlink()


class Limited(Trouble):
    """There is room, but no file may become larger than a little: the system refuses in the middle of writing one."""

    def begin(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))

    def end(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def outcome(disk: Path, trouble: type[Trouble], background: bool) -> dict[str, Any]:
    folder = disk / f"{trouble.__name__}-{background}"
    options = {"save_steps": 1, "max_steps": 6, "log_level": "warning", "save_in_background": background}
    trainer = trainer_for(folder, hungry(99), **options)
    trainer.add_callback(trouble(disk, lambda: trainer._run.checkpoints.finish()))
    trainer.train()
    saved = sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
    resumed = trainer_for(folder, hungry(99), **options)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    return {
        "saved": saved,
        "same": flat(resumed.model).tolist() == flat(trainer.model).tolist(),
        "left": [path.name for path in folder.glob("tmp-*")],
    }


def main() -> None:
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], check=True)
    print(json.dumps([outcome(disk, *case) for case in product((Full, Limited), (True, False))]))


if __name__ == "__main__":
    main()
