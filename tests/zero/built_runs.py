"""Run by `windlass launch`: models of transformers that are divided while they are built; what came of them, as JSON.

Args: folder, name, the folder of a model, a stage of ZeRO ("-1": none, or that of the launcher), and how the model is
made: "pretrained", "model_init" or "config".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.trainer.small import arguments, text_rows
from tests.zero.runs import RANK, WORLD, config

from windlass import Trainer


def made(source: str, way: str) -> Any:
    import transformers

    if way == "config":
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(source))
    return transformers.AutoModelForCausalLM.from_pretrained(source)


def held(model: Any) -> list[int]:
    """The elements of this rank before training, and those of the model."""
    own = [getattr(parameter, "ds_tensor", parameter).numel() for parameter in model.parameters()]
    return [
        sum(own),
        sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()),
    ]


def main() -> None:
    folder, name, source, stage, way = sys.argv[1:]
    args = arguments(
        Path(folder) / name, per_device_train_batch_size=2, gradient_accumulation_steps=4 // WORLD, max_steps=4,
        logging_steps=1, weight_decay=0.1, learning_rate=0.005, **config(int(stage)),
    )  # fmt: skip
    data = {"train_dataset": text_rows(40), "eval_dataset": text_rows(5)}
    if way == "model_init":
        trainer = Trainer(args=args, model_init=lambda: made(source, way), **data)
    else:
        trainer = Trainer(made(source, way), args, **data)
    sizes = held(trainer.model)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    found = {
        "held": sizes, "losses": [before, *losses, trainer.evaluate()["eval_loss"]],
        "flops": trainer.state.total_flos, "trained": trainer.get_num_trainable_parameters(),
    }  # fmt: skip
    if RANK == 0:
        (Path(folder) / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
