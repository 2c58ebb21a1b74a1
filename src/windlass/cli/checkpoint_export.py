"""`windlass checkpoint export`: write the tensors of a checkpoint for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from windlass.checkpoint.export import MAX_SHARD_SIZE, ExportOptions, export_file, export_folder
from windlass.checkpoint.stored import open_folder
from windlass.cli.checkpoint_listing import local_path
from windlass.cli.command_line import DTYPES, answer, in_words
from windlass.config.kinds import size_in_bytes
from windlass.config.sections.fields import QAT_SCHEMES, TRAINED_SCHEME
from windlass.core.errors import Problem, refuse
from windlass.core.locations import at_home, is_url
from windlass.core.output import one_line, say


def export_command(options: argparse.Namespace) -> int:
    target = at_home(options.target)
    form = options.format or ("safetensors" if target.suffix == ".safetensors" else "hf")
    how = _export_options(options, form)
    if options.merge:
        from windlass.finetuning.merging import merge_adapter

        merge_adapter(local_path(options.checkpoint), target, options.base, how.dtype, how.max_shard_size)
        return _answer_sizes(options, target)
    source = open_folder(local_path(options.checkpoint))
    if options.quantize:
        from windlass.finetuning.merging import export_quantized

        scheme = export_quantized(source, target, options.quantize, how)
        if not options.json:
            say(f"quantized: {scheme}, {QAT_SCHEMES[scheme]}")
    elif form == "hf":
        export_folder(source, target, how)
    else:
        export_file(source, target, how)
    return _answer_sizes(options, target)


def _answer_sizes(options: argparse.Namespace, target: Path) -> int:
    """Print the size of a file, or of those with weights in a folder."""
    written = [target] if target.is_file() else sorted(target.glob("*.safetensors"))
    facts = {"written": [{"path": str(path), "bytes": path.stat().st_size} for path in written]}
    return answer(options, facts, (f"{one_line(path)}: {in_words(path.stat().st_size)}" for path in written))


def _export_options(options: argparse.Namespace, form: str) -> ExportOptions:
    problems = []
    if is_url(options.target):
        problems.append(Problem("TARGET", options.target, "name a folder of this machine, and upload that"))
    if form == "hf" and options.tensors == "optimizer":
        fix = "from_pretrained reads no optimizer state: name a file that ends with .safetensors as TARGET"
        problems.append(Problem("--tensors", options.tensors, fix))
    if form == "safetensors" and options.max_shard_size is not None:
        fix = "divides the files of a folder: leave it out, or use --format hf"
        problems.append(Problem("--max-shard-size", options.max_shard_size, fix))
    problems += [*_merge_problems(options, form), *_quantize_problems(options, form)]
    limit = MAX_SHARD_SIZE
    if options.max_shard_size is not None:
        try:
            limit = size_in_bytes(options.max_shard_size)
        except ValueError as error:
            problems.append(Problem("--max-shard-size", options.max_shard_size, str(error)))
    refuse(problems)
    dtype = None if options.dtype is None else getattr(torch, DTYPES[options.dtype])
    return ExportOptions(options.tensors, dtype, limit, options.force)


_NEEDS_FOLDER = "writes a folder for from_pretrained; name a folder as TARGET"


def _merge_problems(options: argparse.Namespace, form: str) -> Iterator[Problem]:
    if not options.merge:
        if options.base is not None:
            yield Problem("--base", options.base, "names the base of a merge; add --merge")
        return
    if form != "hf":
        yield Problem("--merge", options.target, _NEEDS_FOLDER)
    if options.force:
        fix = "a merge writes into a new folder only: leave it out, and name another or remove the earlier result"
        yield Problem("--force", True, fix)
    if options.tensors == "optimizer":
        yield Problem("--merge", True, "merges weights; leave out --tensors")


def _quantize_problems(options: argparse.Namespace, form: str) -> Iterator[Problem]:
    scheme = options.quantize
    if scheme is None:
        return
    if scheme not in (*QAT_SCHEMES, TRAINED_SCHEME):
        yield Problem("--quantize", scheme, f"use one of {', '.join(QAT_SCHEMES)}")
    if form != "hf":
        yield Problem("--quantize", scheme, _NEEDS_FOLDER)
    if options.merge:
        fix = "rounds the weights of a whole model: merge the adapter into a folder first, and export that"
        yield Problem("--quantize", scheme, fix)
    if options.tensors == "optimizer":
        yield Problem("--quantize", scheme, "rounds weights; leave out --tensors")
