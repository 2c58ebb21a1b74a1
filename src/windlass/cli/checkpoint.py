"""`windlass checkpoint`: look at checkpoints, check, compare, export and remove them, without the training code."""

from __future__ import annotations

import argparse

from windlass.cli.command_line import DTYPES
from windlass.core.errors import CheckpointError


def checkpoint_command(words: list[str]) -> int:
    """Run one of the commands; returns the exit code.

    Raises:
        CheckpointError, ConfigError: what was asked for cannot be done.
    """
    options = _parser().parse_args(words)
    try:
        return _run(options)
    except BrokenPipeError:
        raise  # the reader of what is printed has gone
    except OSError as error:
        raise CheckpointError(str(error)) from error


def _run(options: argparse.Namespace) -> int:
    if options.action == "ls":
        from windlass.cli.checkpoint_listing import list_command

        return list_command(options.folder, options.json)
    if options.action == "verify":
        from windlass.cli.checkpoint_listing import verify_command

        return verify_command(options.folder)
    if options.action == "diff":
        from windlass.cli.checkpoint_diff import diff_command

        return diff_command(options.first, options.second, options.json)
    if options.action == "export":
        from windlass.cli.checkpoint_export import export_command

        return export_command(options)
    from windlass.cli.checkpoint_prune import prune_command

    return prune_command(options.folder, options.keep_last, options.keep_best, options.dry_run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="windlass checkpoint",
        allow_abbrev=False,
        description="Look at checkpoints, check, compare, export and remove them.",
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ls | verify | diff | export | prune"
    )
    listing = actions.add_parser("ls", help="what lies in a run's folder", allow_abbrev=False)
    listing.add_argument("folder", metavar="DIR", help="a run's output folder, or one checkpoint")
    listing.add_argument("--json", action="store_true", help="as one JSON list")
    verify = actions.add_parser(
        "verify", help="check every byte; exit code 1 if one is wrong", allow_abbrev=False
    )
    verify.add_argument("folder", metavar="DIR", help="a run's output folder, or one checkpoint")
    diff = actions.add_parser(
        "diff", help="what differs between two checkpoints; exit code 1 if something does", allow_abbrev=False
    )
    diff.add_argument("first", metavar="A", help="a checkpoint, or a folder with a model")
    diff.add_argument("second", metavar="B", help="another")
    diff.add_argument("--json", action="store_true", help="as one JSON object")
    _add_export(actions)
    prune = actions.add_parser("prune", help="remove what need not be kept", allow_abbrev=False)
    prune.add_argument("folder", metavar="DIR", help="a run's output folder")
    prune.add_argument("--keep-last", type=_count, metavar="N", help="keep this many of the newest")
    prune.add_argument("--keep-best", type=_count, metavar="N", help="keep this many of the best")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


def _add_export(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = actions.add_parser(
        "export",
        help="weights or optimizer state as plain safetensors, or for from_pretrained",
        allow_abbrev=False,
    )
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a folder with a model")
    export.add_argument("target", metavar="TARGET", help="a new file NAME.safetensors, or a new folder")
    export.add_argument(
        "--format",
        choices=("safetensors", "hf"),
        help="one file, or a folder that from_pretrained reads (default: by the name of TARGET)",
    )
    export.add_argument("--max-shard-size", metavar="SIZE", help="of a file in the folder (default: 5GB)")
    export.add_argument("--dtype", choices=DTYPES, help="convert floating-point tensors")
    export.add_argument(
        "--tensors", choices=("model", "optimizer"), default="model", help="whose (default: model)"
    )
    export.add_argument("--force", action="store_true", help="replace an earlier result")


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, and is {text}")
    return number
