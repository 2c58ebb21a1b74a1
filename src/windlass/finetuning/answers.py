"""The answers of a trainer's evaluations: which prompts are answered, how that is scored, and where it is kept."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.callbacks.answers_log import AnswersLog
from windlass.core.attributes import attributes_of
from windlass.core.errors import DataError, Problem, refuse
from windlass.core.locations import at_home, local_folder
from windlass.core.logs import get_job_logger
from windlass.core.rng import derive_seed, seed_generators
from windlass.core.types import EvalPrediction
from windlass.dist.gang import Gang
from windlass.finetuning.sft_config import SFTConfig
from windlass.finetuning.text_generation import generate
from windlass.metrics.answer_scores import require_packages, scores_of, scores_of_set
from windlass.metrics.evaluation import named_metrics
from windlass.text.forms import LocatedRows, RowError
from windlass.text.prompt_rows import PromptReader, PromptRow
from windlass.transforms.model_limits import ModelLimits

PROMPTS = "prompts"  # the set of `eval_prompts`
DEFAULT_NEW_TOKENS = 128
_ABOUT_ANSWERS = (
    "eval_prompts_limit",
    "generation_max_length",
    "generation_max_new_tokens",
    "generation_num_beams",
    "generation_do_sample",
)


def check_answers(
    args: SFTConfig, model: nn.Module, eval_dataset: Any, *, with_images: bool, formatted: bool, scored: bool
) -> None:
    """Raise ConfigError with everything that cannot be honoured.

    Args:
        formatted: the script passed `formatting_func`.
        scored: the script passed `compute_metrics`.
    """
    refuse([*_idle_settings(args), *_unanswerable(args, model, eval_dataset, with_images, formatted, scored)])
    require_packages(args.eval_metrics)


def answers_anything(args: SFTConfig) -> bool:
    """Return True if evaluations generate text."""
    return args.predict_with_generate or args.eval_prompts is not None


def _idle_settings(args: SFTConfig) -> Iterator[Problem]:
    if args.generation_max_length is not None and args.generation_max_new_tokens is not None:
        fix = "limits the same as generation_max_new_tokens; set only one"
        yield Problem("generation_max_length", args.generation_max_length, fix)
    if answers_anything(args):
        return
    for name in (*_ABOUT_ANSWERS, "eval_metrics"):
        if getattr(args, name):
            fix = "is of generated answers, and none are generated: set predict_with_generate=True, or eval_prompts"
            yield Problem(name, getattr(args, name), fix)


def _unanswerable(
    args: SFTConfig, model: nn.Module, eval_dataset: Any, with_images: bool, formatted: bool, scored: bool
) -> Iterator[Problem]:
    if not answers_anything(args):
        return
    asked: tuple[str, Any] = ("predict_with_generate", True)
    if not args.predict_with_generate:
        asked = ("eval_prompts", args.eval_prompts)
    if not callable(getattr(model, "generate", None)):
        yield Problem(*asked, f"needs a model with a `generate` method, and {type(model).__name__} has none")
    if with_images:
        yield Problem(*asked, "answers to rows with images are not generated; leave it out")
    if eval_dataset is None:
        yield Problem(*asked, "answers are generated in evaluations: pass eval_dataset")
    if isinstance(eval_dataset, Mapping) and PROMPTS in eval_dataset and args.eval_prompts is not None:
        fix = f"are logged as the set {PROMPTS!r}, which eval_dataset has too: name that one differently"
        yield Problem("eval_prompts", args.eval_prompts, fix)
    if formatted and args.predict_with_generate:
        fix = "formatting_func makes one text of a row, which has no prompt: apply it before, or use eval_prompts"
        yield Problem("predict_with_generate", True, fix)
    if args.predict_with_generate and not (args.eval_metrics or scored):
        fix = "the answers are not scored: set eval_metrics, such as ['exact_match'], or pass compute_metrics"
        yield Problem("predict_with_generate", True, fix)
    if args.predict_with_generate and (args.batch_eval_metrics or args.include_for_metrics):
        name = "batch_eval_metrics" if args.batch_eval_metrics else "include_for_metrics"
        fix = "compute_metrics gets the texts of a whole set, with predictions, label_ids and inputs; leave it out"
        yield Problem(name, getattr(args, name), fix)


def check_lengths(args: SFTConfig, limits: ModelLimits, rows: list[PromptRow]) -> None:
    """Raise RowError for a prompt that leaves no room for an answer of the configured length."""
    room = args.generation_max_new_tokens or 1
    ends = [
        (limits.positions, "the positions of the model"),
        (args.generation_max_length, "generation_max_length"),
    ]
    for most, name in ends:
        for row in rows:
            if most is not None and len(row.ids) + room > most:
                raise RowError(
                    row.number,
                    f"a prompt of {len(row.ids)} tokens and an answer of {room} are more than {name} ({most}): shorten "
                    "the prompt, or change the generation arguments",
                )


def new_tokens(args: SFTConfig, limits: ModelLimits, width: int) -> int:
    """The largest number of tokens of the answers to prompts of `width` tokens."""
    wanted = args.generation_max_new_tokens or DEFAULT_NEW_TOKENS
    if args.generation_max_length is not None:
        wanted = args.generation_max_length - width
    return wanted if limits.positions is None else min(wanted, limits.positions - width)


@dataclass(frozen=True, slots=True)
class Answer:
    """`text` without special tokens; `tokens` counts all of them, the end token included."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class AnsweringModel:
    model: Any  # a causal model of Transformers, or of peft around one
    device: torch.device  # of the model
    data_ranks: Gang  # the ranks that answer different prompts
    in_step: bool  # a forward is a collective, so ranks make equally many of them
    # The context of one batch, such as mixed precision
    context: Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Answering:
    """How prompts are answered: by the arguments, with the tokenizer, within the limits of the model."""

    args: SFTConfig
    tokenizer: Any
    limits: ModelLimits

    def __call__(self, rows: Sequence[PromptRow], writer: AnsweringModel) -> list[Answer]:
        """The answers to all rows, in their order, on every rank. Collective.

        The same rows are batched together on any number of ranks, and a batch has random numbers of its own.
        """
        size, ranks = self.args.eval_batch_size_of(writer.data_ranks.size), writer.data_ranks
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        rounds = -(-len(batches) // ranks.size)
        own: dict[int, list[Answer]] = {}
        for turn in range(rounds):
            number = turn * ranks.size + ranks.rank
            if number < len(batches):
                own[number] = self._answers(batches[number], number, writer)
            elif writer.in_step:  # the answers of another rank, which need this one
                self._answers(batches[-1], number, writer)
        sent = {number: [(answer.text, answer.tokens) for answer in part] for number, part in own.items()}
        found = {number: part for parts in ranks.gather_objects(sent) for number, part in parts.items()}
        return [Answer(*fields) for number in range(len(batches)) for fields in found[number]]

    def _answers(self, rows: Sequence[PromptRow], number: int, writer: AnsweringModel) -> list[Answer]:
        width = max(len(row.ids) for row in rows)
        pad = self.tokenizer.pad_token_id
        # On the left: generation continues after the last column.
        ids = [[pad] * (width - len(row.ids)) + row.ids for row in rows]
        seen = [[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in rows]
        inputs = {
            "input_ids": torch.tensor(ids, device=writer.device),
            "attention_mask": torch.tensor(seen, device=writer.device),
        }
        if self.args.generation_do_sample:
            # Of the batch and not of the rank: the answers are the same on any number of ranks.
            seed = derive_seed(self.args.seed, number)
            seed_generators(seed)
            torch.manual_seed(seed & (2**63 - 1))  # which takes no unsigned numbers of 64 bits
        config = self._config(writer.model, new_tokens(self.args, self.limits, width))
        with writer.context(), _caching(writer.model):
            made = generate(writer.model, inputs, generation_config=config, synced_gpus=writer.in_step)
        return [self._answer(row, config.eos_token_id) for row in made[:, width:].cpu()]

    def _config(self, model: Any, tokens: int) -> Any:
        config = copy.deepcopy(model.generation_config)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        config.eos_token_id = sorted({end for end in (*ends, self.tokenizer.eos_token_id) if end is not None})
        config.pad_token_id = self.tokenizer.pad_token_id
        # `max_length` would count the prompts and their padding, and both together are warned of.
        config.max_new_tokens, config.max_length = tokens, None
        config.num_beams = self.args.generation_num_beams or 1
        config.do_sample = self.args.generation_do_sample
        if not config.do_sample:  # are of sampling, and warned of without it
            config.temperature = config.top_p = config.top_k = config.typical_p = None
        config.use_cache = True
        config.return_dict_in_generate = False
        return config

    def _answer(self, ids: Tensor, ends: Sequence[int]) -> Answer:
        tokens = ids.tolist()
        end = next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return Answer(text.strip(), end)


def _caching(model: Any) -> contextlib.AbstractContextManager[None]:
    """Use the cache of keys and values, which training turns off in the model's config."""
    config = getattr(model, "config", None)
    is_known = getattr(config, "use_cache", None) is not None
    return attributes_of(config, use_cache=True) if is_known else contextlib.nullcontext()


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
        # An evaluation of a dict evaluates each of its sets through the same method.
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
            scores.update(self.compute_metrics(given))
        return named_metrics(prefix, {}, scores)

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
        # Not `splitlines`: text in JSON may have separators of lines other than "\n". Some editors begin with a mark.
        lines = at_home(path).read_text(encoding="utf-8-sig").split("\n")
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
