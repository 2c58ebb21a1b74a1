"""Mistakes on the command line and in recipes."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

from tests.cli.test_train import CLASSIFIER, LM
from tests.reliability.mistakes.mistake import Answer, Mistake, command

SFT = """\
task: sft
data: {train: sums.jsonl, prompt_column: question, completion_column: answer}
tokenizer: {train: {vocab_size: 300}}
adapter: {r: 4}
"""


def room(folder: Path) -> None:
    """Files that the commands work on."""
    (folder / "text.txt").write_text("the cat sat on the mat and the dog did not\n" * 60)
    lines = [
        f"{'good' if index % 2 else 'bad'} film number {index % 7}\t{index % 2}\n" for index in range(64)
    ]
    (folder / "train.tsv").write_text("".join(lines))
    (folder / "dev.tsv").write_text("".join(lines[:8]) + "a film\t7\n")
    (folder / "lm.yaml").write_text(LM)
    (folder / "classifier.yaml").write_text(CLASSIFIER)
    (folder / "sums.jsonl").write_text('{"question": "1 plus 1", "answer": "2"}\n' * 8)
    (folder / "broken.yaml").write_text("data: [train\nmodel: x\n")
    (folder / "table.csv").write_text("text,stars\ngood,1\nbad,0\n")
    (folder / "sft.yaml").write_text(SFT)
    (folder / "script.py").write_text("print('started')\n")


def asked(name: str, words: str, *expected: str | tuple[str, ...]) -> Mistake:
    """A mistake of the command `windlass WORDS`."""

    def make(folder: Path) -> Answer:
        room(folder)
        return command(*words.split())(folder)

    return Mistake(name, expected, make)


def no_tracker(folder: Path) -> Answer:
    room(folder)
    with patch.dict(sys.modules, {"wandb": None}):
        return command("train", "lm.yaml", "training.report_to=wandb")(folder)


def no_transformers(folder: Path) -> Answer:
    with patch.dict(sys.modules, {"transformers": None}):
        return command("train", "sft-lora", "--tiny")(folder)


COMMANDS = (
    Mistake("A recipe without the packages for it", ('"windlass-trainer[train]"',), no_transformers),
    Mistake("A tracker that is not installed", ("report to wandb", "pip install wandb"), no_tracker),
    asked("A command that does not exist", "trian lm.yaml", "trian", "train"),
    asked("An argument as a flag", "train lm.yaml --learning_rate 3e-4", "training.learning_rate=3e-4"),
    asked("Data in place of a recipe", "train sums.jsonl", "sums.jsonl", "data.train=sums.jsonl"),
    asked("A script in place of a recipe", "train script.py", "script.py is a script", "windlass launch script.py"),
    asked("A recipe of a task that does not exist", "train lm.yaml task=sftt", "1 problem", "sftt", "'sft'"),
    asked("A model that does not exist", "train lm.yaml model=no/where", "no/where", "no such folder"),
    asked("A recipe that does not exist", "train nothing.yaml", "nothing.yaml"),
    asked("A recipe that is not YAML", "train broken.yaml", "broken.yaml:2"),
    asked("A misspelt key of a recipe", "train lm.yaml training.learning_rte=1e-3", "learning_rte", "learning_rate"),
    asked("A misspelt section of a recipe", "train lm.yaml trainning.max_steps=3", "trainning", "training"),
    asked("A word as a number", "train lm.yaml training.max_steps=many", "max_steps", "many"),
    asked("Data that does not exist", "train lm.yaml data.train=nowhere.txt", "nowhere.txt", "no such file"),
    asked("A misspelt key of the model", "train lm.yaml model.config.hiden_size=3", "hiden_size", "hidden_size"),
    asked("A misspelt key of the adapter", "train sft.yaml adapter.lora_r=8", "adapter.lora_r", "did you mean 'r'"),
    asked("A word as an adapter's rank", "train sft.yaml adapter.r=eight", "adapter.r='eight'", "whole number"),
    asked("A class that training never saw", "train classifier.yaml", "dev.tsv", "'7'"),
    asked("Names of columns for jsonl", "train classifier.yaml data.train=sums.jsonl", "data.columns", "csv"),
    asked("Resuming where nothing was saved, by a command", "train lm.yaml --resume", "No valid checkpoint", "auto"),
    asked("A folder that cannot be written", "train lm.yaml --output-dir text.txt/run", "output_dir='text.txt/run'"),
    asked("A launch without a script", "launch --num_processes 2", "SCRIPT", "example"),
    asked("A launch of a script that does not exist", "launch --num_processes 2 nothing.py", "nothing.py"),
    asked("A launch of no process", "launch --num_processes 0 script.py", "num_processes", "0"),
    asked("A misspelt flag of a launch", "launch --num_proceses 2 script.py", "num_proceses", "num_processes"),
    asked("Verifying a folder without checkpoints", "checkpoint verify .", "checkpoint"),
    asked("A setting that does not exist", "explain learning_rte", "learning_rte", "learning_rate"),
)  # fmt: skip
