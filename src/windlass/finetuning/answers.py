"""The answers of a trainer's evaluations: which prompts are answered, how that is scored, and where it is kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from windlass.callbacks.answers_log import AnswersLog
from windlass.core.errors import DataError
from windlass.core.locations import local_folder
from windlass.core.logs import get_job_logger
from windlass.core.metric_values import plain_metrics
from windlass.core.types import EvalPrediction
from windlass.finetuning.answering import (
    PROMPTS,
    Answer,
    Answering,
    AnsweringModel,
    answers_anything,
    check_lengths,
)
from windlass.finetuning.sft_config import SFTConfig
from windlass.metrics.answer_scores import scores_of, scores_of_set
from windlass.text.forms import LocatedRows, RowError
from windlass.text.prompt_rows import PromptReader, PromptRow
from windlass.transforms.model_limits import ModelLimits

logger = get_job_logger(__name__)

# Rows of one set that an evaluation writes to `answers.jsonl`; all are scored.
ROWS_KEPT = 1000
Sets = dict[str, list[PromptRow]]
ComputeMetrics = Callable[[EvalPrediction], dict[str, float]]


@dataclass
class EvaluationAnswers:
    """Answers prompts in evaluations."""

    answering: Answering  # how prompts are answered
    compute_metrics: ComputeMetrics | None  # scores the texts of a set; None: named metrics alone
    log: AnswersLog  # where they are kept
    prompts: list[PromptRow] = field(default_factory=list)  # of `eval_prompts`
    # Of the trainer's own evaluation sets, by name; "" for the only one
    sets: Sets = field(default_factory=dict)
    # Of the evaluation that is running: the prompts by the prefix of their metrics, and those without a set.
    _due: Sets | None = None
    _due_prompts: dict[str, list[PromptRow]] = field(default_factory=dict)

    @property
    def args(self) -> SFTConfig:
        return self.answering.args

    @contextlib.contextmanager
    def during(self, dataset: Any, prefix: str) -> Iterator[None]:
        """Within the body, an evaluation of `dataset` runs: None for the trainer's own, the name of one of them, a
        dataset or a dict of datasets. The sets of a dict are evaluations within it.
        """
        if self._due is not None or not answers_anything(self.args):
            yield
            return
        self._due = self._sets_of(dataset, prefix) if self.args.predict_with_generate else {}
        self._due_prompts = {f"{prefix}_{PROMPTS}": self.prompts} if self.prompts else {}
        try:
            yield
        finally:
            self._due, self._due_prompts = None, {}

    def _sets_of(self, dataset: Any, prefix: str) -> Sets:
        found = self.sets
        if isinstance(dataset, str):
            return {prefix: found[dataset]} if dataset in found else {}
        if dataset is not None:
            found = self.read(dataset)
        return {f"{prefix}_{name}" if name else prefix: rows for name, rows in found.items()}

    def metrics(self, prefix: str, step: int, writer: AnsweringModel) -> dict[str, float]:
        """Answer the prompts that belong to the evaluation of this prefix; return their metrics. Collective."""
        found: dict[str, float] = {}
        for key, rows in {prefix: (self._due or {}).get(prefix, []), **self._due_prompts}.items():
            if rows:
                found.update(self._of_set(key, rows, step, writer))
        self._due_prompts = {}
        return found

    def _of_set(
        self, prefix: str, rows: Sequence[PromptRow], step: int, writer: AnsweringModel
    ) -> dict[str, float]:
        answers = self.answering(rows, writer)
        if writer.data_ranks.world.is_main:
            name = prefix.removeprefix("eval_")
            self.log.write(
                [
                    self._row(row, answer, name, step)
                    for row, answer in islice(zip(rows, answers, strict=True), ROWS_KEPT)
                ]
            )
        with_reference = [
            (row, answer.text, row.reference)
            for row, answer in zip(rows, answers, strict=True)
            if row.reference is not None
        ]
        if not with_reference:
            return {}
        asked, texts, references = map(list, zip(*with_reference, strict=True))
        scores = scores_of_set(self.args.eval_metrics, texts, references)
        if self.compute_metrics is not None:
            given = EvalPrediction(texts, references, [row.prompt for row in asked])
            scores.update(plain_metrics(self.compute_metrics(given)))
        return {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in scores.items()
        }

    def _row(self, row: PromptRow, answer: Answer, name: str, step: int) -> dict[str, Any]:
        reference, scores = row.reference, {}
        if reference is not None:
            scores = scores_of(self.args.eval_metrics, answer.text, reference)
        return {
            "step": step,
            "set": name,
            "number": row.number,
            "prompt": row.prompt,
            "answer": answer.text,
            "reference": reference,
            "scores": scores,
            "tokens": answer.tokens,
        }

    # --- prompts ----------------------------------------------------------------------------------------------------

    def read(self, datasets: Any) -> Sets:
        """The prompts of one dataset, under the name "", or of each of a dict of them. Raises DataError."""
        if isinstance(datasets, Mapping):
            return {
                str(name): self._read_rows(rows, f"the {name} dataset") for name, rows in datasets.items()
            }
        return {"": self._read_rows(datasets, "the eval dataset")}

    def _read_rows(self, dataset: Any, where: str) -> list[PromptRow]:
        return self._checked(dataset, self._reader().of_row, where)

    def read_prompts(self, given: Any) -> list[PromptRow]:
        """The prompts of `eval_prompts`: a list, or the path of a file with one JSON value a line. Raises DataError."""
        if given is None:
            return []
        where = given if isinstance(given, str) else "eval_prompts"
        rows = _lines(Path(given)) if isinstance(given, str) else given
        return self._checked(rows, self._reader().of_prompt, where)

    def _reader(self) -> PromptReader:
        return PromptReader(self.answering.tokenizer, self.args.dataset_text_field)

    def _checked(self, dataset: Any, read: Callable[[Any, int], PromptRow], where: str) -> list[PromptRow]:
        chosen = islice(iter(dataset), self.args.eval_prompts_limit)
        try:
            rows = [read(row, number) for number, row in enumerate(chosen)]
            check_lengths(self.args, self.answering.limits, rows)
        except RowError as error:
            located = error.located(dataset)
            raise DataError(f"{where}, {located}" if located is error else str(located)) from None
        return rows


def open_answers(
    args: SFTConfig, tokenizer: Any, limits: ModelLimits, eval_dataset: Any, compute_metrics: Any
) -> EvaluationAnswers:
    """Read the prompts of a trainer. Raises DataError for one that cannot be answered."""
    scored = compute_metrics if args.predict_with_generate else None
    answers = EvaluationAnswers(
        Answering(args, tokenizer, limits), scored, AnswersLog(local_folder(args.output_path))
    )
    answers.prompts = answers.read_prompts(args.eval_prompts)
    if args.predict_with_generate:
        answers.sets = answers.read(eval_dataset)
    return answers


def _lines(path: Path) -> LocatedRows:
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"eval_prompts={str(path)!r} cannot be read: {error}") from None
    rows, places = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not a JSON value ({error.msg})") from None
        places.append(f"{path}, line {number}")
    if not rows:
        raise DataError(f"eval_prompts={str(path)!r} has no prompt")
    return LocatedRows(rows, places)
