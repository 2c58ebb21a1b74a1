"""A run that is given a secret in every place that takes one, and ends in an error that quotes it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from tests.trainer.small import Net, rows, settings

from windlass import Trainer, TrainerCallback, TrainingArguments
from windlass.callbacks.report import ReportCallback
from windlass.core.logs import get_logger, set_verbosity_debug


@dataclass(repr=False)
class Arguments(TrainingArguments):
    my_api_key: str = ""


class Config:
    def to_dict(self) -> dict[str, Any]:
        return {"source": os.environ["CANARY_URL"], "my_api_key": os.environ["MY_API_KEY"]}


class Breaks(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and state.global_step == 2:
            logs["note"] = os.environ["CANARY_URL"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            raise RuntimeError(f"no answer from {args.output_dir} with api_key={args.my_api_key!r}")


def main(folder: Path) -> None:
    set_verbosity_debug()
    url, secret = os.environ["CANARY_URL"], os.environ["MY_API_KEY"]
    changes = {"max_steps": 5, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    args = Arguments(**settings(folder, **changes, report_to=["tensorboard"]), my_api_key=secret)
    args.output_dir = url
    print(args)
    args.to_json_string()
    model: Any = Net()
    model.config = Config()
    log = get_logger("windlass.canary")
    log.warning("%s %r %s", url, args, {"api_key": secret})
    trainer = Trainer(
        model, args, train_dataset=rows(32), callbacks=[Breaks(), ReportCallback(trainer_folder(args))]
    )
    trainer.create_model_card(finetuned_from=url)
    files = fsspec.filesystem("memory")
    try:
        trainer.train(resume_from_checkpoint="auto")
    finally:
        # What was uploaded, for the test to look at; paths in this store hold the whole address.
        uploaded = files.find("/")
        assert any("checkpoint-4" in name or "checkpoint-2" in name for name in uploaded), uploaded
        for number, name in enumerate(uploaded):
            (folder / f"uploaded-{number}").write_bytes(files.cat_file(name))


def trainer_folder(args: Any) -> Path:
    from windlass.core.locations import local_folder

    return local_folder(args.output_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
