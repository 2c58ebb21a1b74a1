"""Run by `torch.distributed.run`: the files of sharded models of transformers, and runs that continue from them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.checkpoint.test_pretrained import FAMILIES, assert_same_files
from tests.trainer.small import arguments, text_rows

from windlass import Trainer
from windlass.checkpoint.weights import WEIGHTS_NAME
from windlass.dist.sharded import local


def run(name: str, kind: str, folder: Path, resume: Path | None = None) -> Trainer:
    torch.manual_seed(0)
    args = arguments(
        folder, max_steps=2, save_strategy="steps", save_steps=1, fsdp="full_shard",
        fsdp_config={"state_dict_type": kind},
    )  # fmt: skip
    trainer = Trainer(FAMILIES[name](), args, train_dataset=text_rows(16))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def check(name: str, kind: str, folder: Path) -> None:
    whole = run(name, kind, folder / "whole")
    whole.save_model(str(folder / "final"))
    resumed = run(name, kind, folder / "resumed", folder / "whole" / "checkpoint-1")
    for got, wanted in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(local(got), local(wanted))
    if not whole.is_world_process_zero():
        return
    (folder / "final" / "training_args.json").unlink()
    type(FAMILIES[name]()).from_pretrained(folder / "final").save_pretrained(folder / "again")
    assert_same_files(folder / "final", folder / "again")
    if kind == "FULL_STATE_DICT":
        saved = folder / "whole" / "checkpoint-2" / WEIGHTS_NAME
        assert load_file(saved).keys() == load_file(folder / "final" / WEIGHTS_NAME).keys()


def main() -> None:
    folder = Path(sys.argv[1])
    for name in ("mixture of experts", "tied"):
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            check(name, kind, folder / name.replace(" ", "-") / kind)


if __name__ == "__main__":
    main()
