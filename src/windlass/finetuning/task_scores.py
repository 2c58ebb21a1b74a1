"""What EleutherAI's `lm_eval` measures: its tasks, and the metrics of a language model on them."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from windlass.core.errors import ConfigError, DataError, Problem, did_you_mean, refuse
from windlass.core.optional import require

_PURPOSE = "evaluate a model on tasks"
_NOT_HERE = {
    "UNSAFE_CODE": "runs code that the model writes; use lm_eval's own command in a sandbox",
    "MULTIMODAL": "has images or sound, and the model is given text alone",
}


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one task, or of a group of tasks."""

    task: str
    metric: str
    filter: str  # of the answers, by lm_eval's name; "none" if the task has no other
    value: float | str  # a number, except for metrics that are something else
    stderr: float | None  # standard error of the value; None if lm_eval has none
    higher_is_better: bool | None
    num_fewshot: int | None  # examples before each question; None for a group whose tasks differ
    samples: int | None  # that were evaluated; None for a group
    of: int | None  # how many the task has; None for a group


def open_tasks(words: Sequence[str], folders: Sequence[str] = ()) -> list[Any]:
    """Return the tasks and groups of lm_eval with their data. Python code that a task's file names is run.

    Args:
        words: names of tasks, groups and tags, patterns of names (`mmlu_*`), or YAML files of a task.
        folders: with more YAML files of tasks, whose names may be used.

    Raises:
        MissingDependencyError: lm_eval is not installed.
        ConfigError: there is no such task, or it needs what is not offered here.
        DataError: a task cannot be loaded.
    """
    manager = _manager(words, list(folders))
    names = list(dict.fromkeys(name for word in words for name in _names(word, manager)))
    found = [one for name in names for one in _loaded(name, manager)]
    _loaded(found, manager)  # refuses a task that is asked for twice, by its name and in a group
    return found


def _manager(words: Sequence[str], folders: list[str]) -> Any:
    """Return the manager of the tasks that are asked for: where they are files and tasks of folders alone, without
    lm_eval's own, whose 14,000 files take seconds to read. A group may name those, and an included file be one.
    """
    managers = require("lm_eval.tasks", _PURPOSE).TaskManager
    own = managers(include_path=folders, include_defaults=False)
    known = {*own.all_subtasks}
    alone = all(
        word in known or (Path(word).is_file() and not _may_name_others(Path(word))) for word in words
    )
    return own if alone else managers(include_path=folders)


def _may_name_others(file: Path) -> bool:
    text = file.read_bytes()
    return b"group" in text or b"include" in text


def _names(word: str, manager: Any) -> list[str]:
    """Return the names that a word or pattern means; a file as it is."""
    if Path(word).is_file():
        return [word]
    if found := manager.match_tasks([word]):
        return list(found)
    known = manager.all_tasks
    raise ConfigError(
        Problem("--tasks", word, f"is not one of lm_eval's {len(known):,} tasks{did_you_mean(word, known)}")
    )


def _loaded(what: str | list[Any], manager: Any) -> list[Any]:
    """Return the outermost tasks and groups of what is asked for."""
    try:
        loaded = manager.load(what)
    except Exception as error:  # of the task's file, its code, its data or the network
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"lm_eval cannot load {what if isinstance(what, str) else 'the tasks'}: {reason}"
        ) from error
    refuse(
        Problem("--tasks", name, why)
        for name, task in loaded["tasks"].items()
        for mark, why in _NOT_HERE.items()
        if getattr(task, mark, False)
    )
    groups = loaded.get("groups", {})
    inner = {name for children in loaded.get("group_map", {}).values() for name in children}
    return [one for name, one in [*groups.items(), *loaded["tasks"].items()] if name not in inner]


def score(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Any],
    *,
    limit: float | None = None,
    batch_size: int | str = 1,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
) -> list[Score]:
    """Return the metrics of a model on tasks of `open_tasks`, as lm_eval computes them with its default seeds.

    Args:
        model: a language model of transformers, with or without an adapter.
        limit: samples of each task; below 1 a share of them. By default all.
        batch_size: "auto": as many as memory holds.
        num_fewshot: by default what each task's file says. A task whose file says 0 keeps 0.
        apply_chat_template: of the tokenizer, around each question.

    Raises:
        DataError: the tasks do not work with these options.
    """
    harness = require("lm_eval.models.huggingface", _PURPOSE)
    evaluator = require("lm_eval.evaluator", _PURPOSE)
    # Standard output is the command's: tasks may print.
    with contextlib.redirect_stdout(sys.stderr), _only_errors("lm_eval.evaluator"):
        with _only_errors("lm_eval.models.huggingface"):  # it advises against a model that is loaded already
            wrapped = harness.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        try:
            found = evaluator.simple_evaluate(
                model=wrapped,
                tasks=list(tasks),
                num_fewshot=num_fewshot,
                limit=limit,
                log_samples=False,
                apply_chat_template=apply_chat_template,
                task_manager=require("lm_eval.tasks", _PURPOSE).TaskManager(include_defaults=False),
            )
        except ValueError as error:  # more examples before a question than the task has, for one
            raise DataError(f"lm_eval cannot evaluate the tasks with these options: {error}") from error
    return list(_scores(found))


def _scores(found: Mapping[str, Any]) -> Iterator[Score]:
    """Yield the numbers of lm_eval's results, whose keys are "metric,filter" and "metric_stderr,filter"."""
    measured = {**found["results"], **found.get("groups", {})}
    for task, values in measured.items():
        counts = found["n-samples"].get(task, {})
        better = found["higher_is_better"].get(task, {})
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = values.get(f"{metric}_stderr,{filtered}")
            yield Score(
                task=task,
                metric=metric,
                filter=filtered,
                value=float(value) if isinstance(value, Real) else str(value),
                stderr=float(stderr) if isinstance(stderr, Real) else None,
                higher_is_better=better.get(metric),
                num_fewshot=found["n-shot"].get(task),
                samples=counts.get("effective"),
                of=counts.get("original"),
            )


@contextlib.contextmanager
def _only_errors(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
