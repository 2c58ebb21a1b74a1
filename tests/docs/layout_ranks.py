"""Run by `torch.distributed.run`: a sharded run that leaves checkpoints and whole weights behind."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.trainer.background_cases import trainer_of


def main() -> None:
    trainer = trainer_of(Path(sys.argv[1]), max_steps=4, fsdp="full_shard")
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
