"""`windlass checkpoint`: list, verify, compare, export, publish and remove checkpoints, without the training code."""

from __future__ import annotations

import argparse
import importlib

from windlass.cli.command_line import DTYPES, CommandParser
from windlass.config.sections.fields import TRAINED_SCHEME


def checkpoint_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    module, function, _ = _COMMANDS[options.action]
    return int(getattr(importlib.import_module(f"windlass.cli.{module}"), function)(options))


# Module, function and help of each command.
_COMMANDS = {
    "ls": ("checkpoint_listing", "list_command", "list the checkpoints in a run's folder"),
    "verify": ("checkpoint_listing", "verify_command", "check every byte; exit code 1 if one is wrong"),
    "diff": ("checkpoint_listing", "diff_command", "compare two checkpoints; exit code 1 if they differ"),
    "export": (
        "checkpoint_export",
        "export_command",
        "weights or optimizer state as plain safetensors, or for from_pretrained",
    ),
    "push": ("checkpoint_push", "push_command", "publish a run's newest checkpoint on the Hub"),
    "prune": ("checkpoint_listing", "prune_command", "remove checkpoints"),
}


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass checkpoint",
        example="windlass checkpoint ls runs",
        description="List, verify, compare, export, publish and remove checkpoints.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar=" | ".join(_COMMANDS))
    made = {name: actions.add_parser(name, help=text) for name, (_, _, text) in _COMMANDS.items()}
    for name in ("ls", "verify"):
        where = "a run's output folder, a folder with runs below it, or one checkpoint"
        made[name].add_argument("folder", metavar="DIR", help=where)
    made["diff"].add_argument("first", metavar="A", help="a checkpoint, or a folder with a model")
    made["diff"].add_argument("second", metavar="B", help="another")
    _add_export(made["export"])
    _add_push(made["push"])
    prune = made["prune"]
    prune.add_argument("folder", metavar="DIR", help="a run's output folder")
    prune.add_argument("--keep-last", type=_count, metavar="N", help="keep this many of the newest")
    prune.add_argument("--keep-best", type=_count, metavar="N", help="keep this many of the best")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    for action in made.values():
        action.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _add_push(push: CommandParser) -> None:
    push.add_argument(
        "folder", metavar="DIR", help="a run's output folder, one checkpoint, or a folder with a model"
    )
    push.add_argument("repository", metavar="REPO", help="OWNER/NAME, or NAME")
    push.add_argument("--revision", metavar="BRANCH", help="branch of the repository (default: its main one)")
    push.add_argument("--private", action="store_true", help="make a new repository private")
    add = push.add_mutually_exclusive_group().add_argument
    alone = "the model alone: that in the folder itself, else that of its newest checkpoint"
    add("--model-only", action="store_true", help=alone)
    own = "into the folder checkpoint-N of the repository, instead of last-checkpoint"
    add("--own-folder", action="store_true", help=own)


def _add_export(export: CommandParser) -> None:
    add = export.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a folder with a model")
    add("target", metavar="TARGET", help="a new file NAME.safetensors, or a new folder")
    add(
        "--format",
        choices=("safetensors", "hf"),
        help="one file, or a folder that from_pretrained reads (default: by the name of TARGET)",
    )
    add("--max-shard-size", metavar="SIZE", help="of a file in the folder (default: 5GB)")
    add("--dtype", choices=DTYPES, help="convert floating-point tensors")
    add("--tensors", choices=("model", "optimizer"), default="model", help="whose (default: model)")
    add("--merge", action="store_true", help="add an adapter to the weights of its base, into a new folder")
    add(
        "--base", metavar="MODEL", help="name or folder of the base (default: the one that the adapter names)"
    )
    add(
        "--quantize",
        nargs="?",
        const=TRAINED_SCHEME,
        metavar="SCHEME",
        help="weights of few bits for from_pretrained (default: what the run trained for with qat)",
    )
    add("--force", action="store_true", help="replace an earlier result")


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, and is {text}")
    return number
