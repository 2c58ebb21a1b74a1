"""`windlass evaluate`: the metrics of a trained model on tasks of EleutherAI's lm_eval."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.cli.command_line import DTYPES, CommandParser, answer, local_place
from windlass.cli.generate_command import add_model_options
from windlass.core.activity import Activity
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.optional import check_installed, version_of
from windlass.core.output import as_json, one_line, say, table
from windlass.core.whole_file import write_whole
from windlass.recipes.quiet import hide_loading_bars

if TYPE_CHECKING:
    import torch

    from windlass.finetuning.task_scores import Score

SCHEMA = "windlass-evaluate/1"
HEADERS = ("task", "metric", "value", "stderr")
_COLUMNS = 80

_HELP = """\
Measure a trained model on tasks of EleutherAI's lm_eval, and print a table of its metrics. Nothing is written unless
--output is given. Data of tasks that have a name come from the Hub; a task in a file of your own may read files.
"""


def evaluate_command(words: Sequence[str]) -> int:
    options = build_parser().parse_args(words)
    refuse(_problems(options))
    # What can be wrong is checked before tasks are loaded, which may download gigabytes.
    _source(options)
    device = _device(options.device)
    check_installed("lm_eval", "evaluate a model on tasks")
    with Activity("loading the tasks"):
        from windlass.finetuning.task_scores import open_tasks, score

        tasks = open_tasks(_tasks(options), options.include_path)
    with Activity("loading the model"):
        name = _source(options)  # again: a run that goes on may have removed what was its newest checkpoint
        model, tokenizer = _open(name, options, device)
    found = score(
        model,
        tokenizer,
        tasks,
        limit=options.limit,
        batch_size=_batch_size(options),
        num_fewshot=options.num_fewshot,
        apply_chat_template=options.apply_chat_template,
    )
    facts = _facts(name, options, model, found)
    answer(options, facts, _lines(facts, found))
    if options.output is not None:  # after they are printed, because a disk may be full
        write_whole(options.output, as_json(facts))
    for note in _notes(options, tokenizer, found):
        say(note, error=True)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass evaluate",
        description=_HELP,
        example="windlass evaluate runs/sft-lora --tasks hellaswag --limit 100",
    )
    add_model_options(parser)
    add = parser.add_argument
    add("--merge", action="store_true", help="add an adapter to the weights of its base first")
    add("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: this machine's accelerator)")
    tasks = "names of tasks, groups and tags, patterns of names, or YAML files; separated by commas"
    add("--tasks", required=True, metavar="NAMES", help=tasks)
    more = "a folder with YAML files of more tasks; may be repeated"
    add("--include_path", action="append", default=[], metavar="DIR", help=more)
    add("--limit", type=float, metavar="N", help="samples of each task; below 1 a share (default: all)")
    add("--batch_size", default="1", metavar="N", help="or auto: as many as memory holds (default: 1)")
    shots = "examples before each question (default: what each task's file says)"
    add("--num_fewshot", type=int, metavar="N", help=shots)
    add("--apply_chat_template", action="store_true", help="give each question as the user's turn of a chat")
    add(
        "--output", type=local_place, metavar="FILE", help="write the results as JSON too; a file is replaced"
    )
    add("--json", action="store_true", help=f"as one JSON object of the form {SCHEMA}")
    return parser


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    limit, shots, size = options.limit, options.num_fewshot, options.batch_size
    if not all(_tasks(options)):
        yield Problem("--tasks", options.tasks, "name tasks, separated by commas")
    for word in _tasks(options):
        if word.endswith((".yaml", ".yml")) and not Path(word).is_file():
            yield Problem("--tasks", word, "there is no such file")
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit.is_integer())):
        yield Problem("--limit", limit, "must be a whole number, or a share between 0 and 1")
    if shots is not None and shots < 0:
        yield Problem("--num_fewshot", shots, "must be at least 0")
    if not re.fullmatch(r"[1-9][0-9]*|auto", size):
        yield Problem("--batch_size", size, "must be at least 1, or auto")
    for folder in options.include_path:
        if not Path(folder).is_dir():
            yield Problem("--include_path", folder, "is not a folder")
    if options.output is not None and not _may_be_written(options.output):
        yield Problem("--output", str(options.output), "name a file in a folder that exists")


def _may_be_written(path: Path) -> bool:
    # A device such as /dev/stdout would be replaced by a file.
    return path.parent.is_dir() and (path.is_file() or not path.exists())


def _tasks(options: argparse.Namespace) -> list[str]:
    return [word.strip() for word in options.tasks.split(",")]


def _batch_size(options: argparse.Namespace) -> int | str:
    return options.batch_size if options.batch_size == "auto" else int(options.batch_size)


def _source(options: argparse.Namespace) -> str:
    """Return the folder or name of the model. Raises CheckpointError if there is none, and ConfigError for options of
    adapters with another model.
    """
    from windlass.checkpoint.adapters import ADAPTER_CONFIG
    from windlass.finetuning.trained_model import find_model

    name = find_model(options.model)
    if not (Path(name) / ADAPTER_CONFIG).is_file():
        given = (("--base", options.base), ("--merge", options.merge))
        refuse(Problem(flag, value, f"{name} is not an adapter") for flag, value in given if value)
    return name


def _device(word: str | None) -> torch.device | None:
    """Return the device of that name. Raises ConfigError if this machine does not have it."""
    import torch

    from windlass.core.device import choose_device, visible_devices

    if word is None:
        return None
    kind = choose_device().type
    here = ["cpu", *(f"{kind}:{index}" for index in range(visible_devices()))]
    known = {*here, kind}
    if word not in known:
        raise ConfigError(Problem("--device", word, f"this machine has {', '.join(here)}"))
    return torch.device(word)


def _open(name: str, options: argparse.Namespace, device: torch.device | None) -> tuple[Any, Any]:
    """Return the model and its tokenizer. Raises ConfigError if a chat template is asked for that it lacks."""
    import torch

    from windlass.finetuning.merging import merge
    from windlass.finetuning.trained_model import open_trained

    hide_loading_bars()
    dtype = "auto" if options.dtype is None else getattr(torch, DTYPES[options.dtype])
    model, tokenizer = open_trained(name, options.base, dtype, device)
    if options.apply_chat_template and tokenizer.chat_template is None:
        raise ConfigError(
            Problem("--apply_chat_template", True, f"the tokenizer of {name} has no chat template")
        )
    return merge(model) if options.merge else model, tokenizer


def _facts(name: str, options: argparse.Namespace, model: Any, found: Sequence[Score]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": name,
        "base": options.base,
        "merged": options.merge,
        "lm_eval": version_of("lm_eval"),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "batch_size": _batch_size(options),
        "limit": options.limit,
        "apply_chat_template": options.apply_chat_template,
        "scores": [asdict(one) for one in found],
    }


def _lines(facts: dict[str, Any], found: Sequence[Score]) -> Iterator[str]:
    yield one_line(facts["model"])
    size = facts["batch_size"]
    yield f"lm_eval {facts['lm_eval']}, {facts['dtype']}, {facts['device']}, batch size {size}\n"
    rows: list[tuple[str, ...]] = [HEADERS]
    for before, one in zip([None, *found], found, strict=False):
        is_first = before is None or before.task != one.task
        metric = one.metric if one.filter == "none" else f"{one.metric} ({one.filter})"
        stderr = "-" if one.stderr is None else _number(one.stderr)
        rows.append((one_line(one.task) if is_first else "", one_line(metric), _number(one.value), stderr))
    others = sum(2 + max(map(len, column)) for column in list(zip(*rows, strict=True))[1:])
    room = max(16, _COLUMNS - others)
    yield from table([part for row in rows for part in _folded(row, room)])


def _folded(row: tuple[str, ...], room: int) -> Iterator[tuple[str, ...]]:
    """Yield a row in lines whose first cell is at most `room` long."""
    yield (row[0][:room], *row[1:])
    for start in range(room, len(row[0]), room):
        yield (row[0][start : start + room], *("" for _ in row[1:]))


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return one_line(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.4g}"


def _notes(options: argparse.Namespace, tokenizer: Any, found: Sequence[Score]) -> Iterator[str]:
    """Yield what a reader of the numbers would otherwise not know."""
    counts = {
        one.task: (one.samples, one.of) for one in found if one.samples is not None and one.of is not None
    }
    samples, of = (sum(column) for column in zip(*counts.values(), strict=True)) if counts else (0, 0)
    if samples < of:
        yield f"note: measured on {samples:,} of {of:,} samples (--limit); not the figures of whole tasks"
    shots = options.num_fewshot
    kept = (
        [] if shots is None else sorted({one.task for one in found if one.num_fewshot not in (None, shots)})
    )
    if kept:
        yield f"note: --num_fewshot={shots} is not used for {', '.join(kept)}, whose files set 0"
    if getattr(tokenizer, "chat_template", None) is not None and not options.apply_chat_template:
        yield "note: the tokenizer has a chat template, which is not used without --apply_chat_template"
