"""`windlass merge-weights`: merge sharded weights into one `model.safetensors`."""

from __future__ import annotations

from windlass.cli.command_line import CommandParser, answer, local_place
from windlass.core.errors import CheckpointError, ConfigError, Problem


def merge_weights_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    if options.unsafe_serialization:
        fix = "weights are written as safetensors only; leave it out"
        raise ConfigError(Problem("--unsafe_serialization", True, fix))
    source, target = options.checkpoint_directory, options.output_path
    from windlass.checkpoint.export import ExportOptions, export_file
    from windlass.checkpoint.files import Files
    from windlass.checkpoint.sharded import index_name
    from windlass.checkpoint.store import is_checkpoint
    from windlass.checkpoint.stored import open_folder
    from windlass.checkpoint.weights import WEIGHTS_NAME

    if not (source / index_name("model")).is_file():
        raise CheckpointError(f"{source} has no sharded weights: there is no {index_name('model')}")
    if (target / WEIGHTS_NAME).exists():
        raise CheckpointError(f"{target / WEIGHTS_NAME} exists already; name another folder")
    # By what links lead to: the merged weights would go with the parts.
    inside = target.resolve().is_relative_to(source.resolve())
    if options.remove_checkpoint_dir and inside:
        fix = f"{target} lies in the folder that would be removed; name another, or leave this out"
        raise ConfigError(Problem("--remove_checkpoint_dir", True, fix))
    if options.remove_checkpoint_dir and is_checkpoint(source):
        fix = (
            f"{source} is a checkpoint, with the optimizer and all else that a run resumes with; leave this out, or "
            "remove it later by `windlass checkpoint prune`"
        )
        raise ConfigError(Problem("--remove_checkpoint_dir", True, fix))
    entry = export_file(open_folder(source), target / WEIGHTS_NAME, ExportOptions())
    written = target / WEIGHTS_NAME
    if options.remove_checkpoint_dir:
        Files().remove_tree(source)
    removed = [str(source)] if options.remove_checkpoint_dir else []
    facts = {"written": str(written), "bytes": entry.size, "sha256": entry.sha256, "removed": removed}
    line = f"{written}: {entry.size:,} bytes, sha256 {entry.sha256}"
    return answer(options, facts, [line, *(f"{folder} removed" for folder in removed)])


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass merge-weights",
        description="Merge the weights that each process wrote, one tensor at a time.",
    )
    add = parser.add_argument
    add(
        "checkpoint_directory",
        type=local_place,
        help="a folder with model.parts.json and the files of each rank",
    )
    add("output_path", type=local_place, help="the folder that model.safetensors is written to")
    add("--unsafe_serialization", action="store_true", help="refused: nothing is written as a pickle")
    add("--remove_checkpoint_dir", action="store_true", help="remove the parts once they are merged")
    add("--json", action="store_true", help="as one JSON object")
    return parser
