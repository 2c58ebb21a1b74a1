"""Fine-tuning and preferences by a recipe: the small base that is trained first, the adapter, the trainer."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.checkpoint.adapters import ADAPTER_CONFIG, peft_library
from windlass.checkpoint.files import Files
from windlass.checkpoint.opening import download_folder, open_store
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import CheckpointError, ConfigError, DataError, Problem, refuse
from windlass.core.locations import is_url, local_folder
from windlass.core.logs import get_job_logger
from windlass.core.optional import require
from windlass.core.rng import set_seed
from windlass.core.whole_file import write_whole
from windlass.core.world import world_from_environment
from windlass.data.collate_pad import default_data_collator
from windlass.recipes.image_tuning import image_model
from windlass.recipes.modelling import TextShape, base_config, build_model, check_model_type
from windlass.recipes.samples import pack
from windlass.recipes.schema import BaseSpec, DataSpec, ModelSpec, Recipe, RecipeParts, field_names
from windlass.recipes.splits import load_records
from windlass.recipes.tuning_data import first_rows, takes_turns, tuning_rows, tuning_texts, tuning_tokenizer
from windlass.text.forms import LocatedRows
from windlass.trainer.instead import takes_place

if TYPE_CHECKING:
    from windlass.dist.gang import Gang
    from windlass.finetuning.tuning_config import TuningConfig
    from windlass.transforms.model_limits import ModelLimits

logger = get_job_logger(__name__)

Prepare = Callable[[Any, str], Any]
"""(rows, name of the dataset) -> what is trained on."""

FOLDER = "base"
_SETTINGS = "base_recipe.json"
_BEGUN = "begun.json"
"""The settings of a base that is being trained."""


def build_sft_trainer(parts: RecipeParts, args: TrainingArguments) -> Any:
    """Return an `SFTTrainer` for the recipe's model, or for a base that is trained now, unless it was before."""
    from windlass.finetuning.sft_config import SFTConfig
    from windlass.finetuning.sft_data import SFTData, holds_images
    from windlass.finetuning.sft_trainer import SFTTrainer

    assert isinstance(args, SFTConfig)
    check_model_type(parts.recipe.model)
    if holds_images(parts.train):
        name, processor = image_model(parts.recipe, parts.tokenizer, args.seed)
        return _tuned_trainer(SFTTrainer, name, parts, args, processor)

    def preparation(tokenizer: Any, limits: ModelLimits) -> Prepare:
        data = SFTData(args, tokenizer, None, own_collator=False, limits=limits)
        packs = {"train": args.packing, "eval": args.packs_evaluation}
        return lambda rows, name: data.prepare(rows, name, packs[name])

    name = parts.recipe.model.name or base_of(parts, args, parts.train, preparation)
    return _tuned_trainer(SFTTrainer, name, parts, args, parts.tokenizer)


def build_preference_trainer(
    kind: Any, parts: RecipeParts, args: TrainingArguments, adapter_task: str
) -> Any:
    """As `build_sft_trainer`, of the class `kind`. `adapter_task`: what peft calls the task of the model."""
    from windlass.finetuning.tuning_config import TuningConfig

    assert isinstance(args, TuningConfig)
    check_model_type(parts.recipe.model)

    def preparation(tokenizer: Any, limits: ModelLimits) -> Prepare:
        prepare: Prepare = kind.preparation(args, tokenizer, limits).prepare
        return prepare

    name = parts.recipe.model.name or base_of(parts, args, chosen_answers(parts.train), preparation)
    return _tuned_trainer(kind, name, parts, args, parts.tokenizer, adapter_task)


def _tuned_trainer(
    kind: Any,
    model: Any,
    parts: RecipeParts,
    args: TuningConfig,
    processing_class: Any,
    adapter_task: str = "CAUSAL_LM",
) -> Any:
    """Return a trainer of the class `kind` for a model or its name, which is loaded in the recipe's dtype."""
    from windlass.finetuning.base_model import few_bits

    recipe = parts.recipe
    if isinstance(model, str):
        options: Any = args.model_init_kwargs or {}  # JSON text was parsed when the arguments were made
        dtype = {} if "torch_dtype" in options else {"dtype": recipe.model.dtype}
        args.model_init_kwargs = {**dtype, **options}
    return kind(
        model,
        args=args,
        train_dataset=parts.train,
        eval_dataset=parts.evaluation,
        processing_class=processing_class,
        peft_config=build_adapter(recipe, adapter_task),
        quantization_config=recipe.quantization and few_bits(recipe.quantization, recipe.model.dtype),
    )


def build_adapter(recipe: Recipe, task: str = "CAUSAL_LM") -> Any:
    """The adapter's configuration; None without one. Raises ConfigError for keys and values that peft does not know,
    and for initial weights that the trainer would refuse.
    """
    from windlass.finetuning.peft_adapters import refuse_beginnings

    if recipe.adapter is None:
        return None
    peft = peft_library("train an adapter")
    try:
        adapter = peft.LoraConfig(**{"task_type": task, "target_modules": "all-linear", **recipe.adapter})
    except (TypeError, ValueError) as error:
        raise ConfigError(Problem("adapter", recipe.adapter, str(error))) from error
    refuse_beginnings(adapter, "adapter")
    return adapter


def new_base(spec: BaseSpec, tokenizer: Any) -> Any:
    """The small base with new weights."""
    text = TextShape(tokenizer, spec.block_size, "base.block_size")
    return build_model(ModelSpec(config=base_config(spec.config)), "AutoModelForCausalLM", [], {}, text)


# --- the base ---------------------------------------------------------------------------------------------------------


def base_of(
    parts: RecipeParts, args: TuningConfig, texts: Any, preparation: Callable[[Any, ModelLimits], Prepare]
) -> Any:
    """Return the folder of a small base that is trained now, unless it was before; its config, with new weights, where
    nothing is trained.

    Args:
        texts: rows that it is trained on.
        preparation: returns what prepares the datasets of the trainer, for a tokenizer and the limits of a model.

    Raises:
        ConfigError, DataError: rows that the trainer cannot prepare, before the base is trained for them. What is
            prepared is kept, and found by the trainer.
    """
    from windlass.finetuning.base_model import set_special_tokens
    from windlass.finetuning.templates import take_over_template
    from windlass.transforms.model_limits import ModelLimits
    from windlass.zero.building import DividedBuilding

    spec = parts.recipe.base or BaseSpec()
    tokenizer = deepcopy(parts.tokenizer)
    take_over_template(getattr(args, "chat_template_path", None), tokenizer)
    set_special_tokens(tokenizer, args)
    # Without memory, only for its limits. It is loaded from its folder later, or trained.
    with DividedBuilding.paused(), require("torch", "train").device("meta"):
        base = new_base(spec, tokenizer)
    if takes_place():
        return base.config
    prepare = preparation(tokenizer, ModelLimits.of(base))
    prepare(parts.train, "train")
    if parts.evaluation is not None:
        prepare(parts.evaluation, "eval")
    return str(trained_base(parts, texts, args))


def _begin_base(folder: Path, settings: str) -> None:
    """Prepare the folder of a base, with what was saved of it before; of one with other settings nothing is kept."""
    begun = folder / _BEGUN
    if not (begun.is_file() and begun.read_text(encoding="utf-8") == settings):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_whole(begun, settings)


def _complete_base(folder: Path, settings: str) -> None:
    for saved in folder.glob("checkpoint-*"):
        shutil.rmtree(saved)
    # Written last, so the folder is complete if this file exists.
    Files().write(folder / _SETTINGS, [settings.encode()])


def _settings_of(spec: BaseSpec, data: DataSpec, seed: int, texts: list[str], tokenizer: Any) -> str:
    """What the weights of a base depend on, as JSON. Its embeddings are in the order of the tokenizer's entries: a
    tokenizer that was trained on other rows of the same file would give them other meanings. Its texts are not those of
    rows that are held out, which depend on the seed and on the file as it is now.
    """
    depends = {**asdict(spec), "data": asdict(data), "seed": seed, "texts": _digest(texts)}
    return json.dumps(
        {**depends, "vocabulary": _digest(sorted(tokenizer.get_vocab().items()))}, sort_keys=True
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _is_kept(folder: Path, settings: str, resumed: bool) -> bool:
    """Return True for a complete base that is the one to use. Raises ConfigError if a resumed run asks for another."""
    path = folder / _SETTINGS
    if not path.is_file():
        return False
    before = path.read_text(encoding="utf-8")
    if resumed and before != settings:
        _refuse_other_base(before, settings)
    return resumed or before == settings


def _refuse_other_base(before: str, now: str) -> None:
    """Raise ConfigError if a resumed run asks for another base than the one that it began with."""
    settings, wanted = json.loads(before), json.loads(now)
    refuse(
        Problem(
            f"base.{name}",
            wanted[name],
            f"the run that is resumed began with {settings.get(name)!r}, on whose base it was trained; put that back, "
            "or start a new run in another folder (--output-dir)",
        )
        for name in field_names(BaseSpec)
        if settings.get(name) != wanted[name]
    )


def _base_arguments(folder: Path, spec: BaseSpec, args: TrainingArguments) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        max_steps=spec.max_steps,
        per_device_train_batch_size=spec.batch_size,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.1,
        logging_steps=50,
        # A base takes minutes. A signal of a scheduler saves it all the same, and it is continued.
        save_strategy="no",
        seed=args.seed,
        use_cpu=args.use_cpu,
        report_to="none",
        disable_tqdm=args.disable_tqdm,
        log_level="warning",
    )


def trained_base(parts: RecipeParts, rows: Any, args: TrainingArguments) -> Path:
    """Return the folder of a small model that is trained on the rows' texts, unless one with these settings exists. A
    resumed run keeps the one that it began with, also if its data has changed since.

    Raises:
        ConfigError: a resumed run asks for another base, another run is under way in this folder, or its adapters need
            the base that this one would replace. CheckpointError: its folder cannot be written, is not on all machines,
            or is missing and the adapter of a resumed run needs it; on all ranks.
        KeyboardInterrupt: the user ends its training, which the next call continues.
    """
    from windlass.dist.lockstep import together
    from windlass.trainer.run_folder import RunFolder
    from windlass.trainer.session import Session

    recipe, spec = parts.recipe, parts.recipe.base or BaseSpec()
    folder = local_folder(args.output_path) / FOLDER
    texts = list(tuning_texts(first_rows(rows), recipe.data.text_column))
    settings = _settings_of(spec, recipe.data, args.seed, texts, parts.tokenizer)
    own = _base_arguments(folder, spec, args)
    # In the layout of a base, which shares out its rows. The trainer that follows divides the model as it is asked to;
    # the reverse is not possible in one process.
    all_ranks = Session.open(own).all_ranks
    together(all_ranks, lambda: _find_base(folder, args), (CheckpointError, OSError))
    kept = all_ranks.gather_objects(_is_kept(folder, settings, parts.resumed))
    if all(kept):
        return folder
    # A machine that trains it would wait for one that does not; and a new one would not be that of a resumed run.
    if any(kept):
        raise CheckpointError(
            f"{folder} is not on all machines of the job: copy it, or let them share a folder"
        )
    if parts.resumed and recipe.adapter is not None:
        raise CheckpointError(
            f"{folder} holds no complete base, and the adapter of the run that is resumed was trained on one. Put the "
            f"folder {FOLDER} of that run there"
        )
    # The base of a run that is under way in this folder is not replaced.
    run = RunFolder(args, all_ranks)
    run.take()
    try:
        adapters = together(all_ranks, lambda: _adapters_on(folder, args), (CheckpointError, OSError))
        if any(found := all_ranks.gather_objects(adapters)):
            fix = f"holds an adapter of an earlier run ({max(found)[-1]}), whose base this run would replace by another"
            raise ConfigError(
                Problem("output_dir", args.output_dir, f"{fix}: choose another folder (--output-dir)")
            )
        _train_base(parts, texts, own, settings, all_ranks)
    finally:
        run.release(None)
    return folder


def _find_base(folder: Path, args: TrainingArguments) -> None:
    """Download the base of a run in a remote folder, which another machine may have begun."""
    if is_url(args.output_path) and world_from_environment().is_local_main and not folder.exists():
        download_folder(args.output_path, FOLDER, last=_SETTINGS)


def _adapters_on(folder: Path, args: TrainingArguments) -> list[str]:
    """Return the names of checkpoints of the run's folder that hold adapters, if their base is complete."""
    if not (folder / _SETTINGS).is_file():
        return []
    return [
        info.path.name for info in open_store(args.output_path).committed() if ADAPTER_CONFIG in info.files
    ]


def _train_base(
    parts: RecipeParts, texts: list[str], own: TrainingArguments, settings: str, all_ranks: Gang
) -> None:
    from windlass.dist.lockstep import together
    from windlass.trainer.trainer import Trainer
    from windlass.zero.building import DividedBuilding

    tokenizer, spec, folder = parts.tokenizer, parts.recipe.base or BaseSpec(), Path(own.output_path)
    is_main = world_from_environment().is_main
    logger.warning(
        "no model is named: first training a small base on the same text, for %d updates", spec.max_steps
    )
    set_seed(own.seed)
    with DividedBuilding.paused():
        model = new_base(spec, tokenizer)
    trainer = Trainer(
        model,
        own,
        default_data_collator,
        pack(texts, tokenizer, spec.block_size),
        processing_class=tokenizer,
    )
    together(all_ranks, lambda: _begin_base(folder, settings) if is_main else None, (OSError,))
    trainer.train(resume_from_checkpoint="auto")
    if trainer.state.global_step < spec.max_steps:
        raise KeyboardInterrupt
    trainer.save_model()
    together(all_ranks, lambda: _complete_base(folder, settings) if is_main else None, (OSError,))


def load_preferences(recipe: Recipe, seed: int, saved_tokenizer: Path | None = None) -> RecipeParts:
    """Read the rows of a recipe, and load or train its tokenizer; see `Task.build_parts`."""
    train, held = (
        tuning_rows(found, recipe.data) for found in load_records(recipe.data, seed, cut_texts=False)
    )
    chosen = chosen_answers(train)
    if not chosen:
        columns = ", ".join(sorted({name for row in train for name in row}))
        raise DataError(
            f"{recipe.data.train}: no row has a chosen answer or a completion; its columns: {columns}"
        )
    tokenizer = tuning_tokenizer(recipe, chosen, saved_tokenizer)
    turns = takes_turns(chosen, recipe.data.text_column)
    resumed = saved_tokenizer is not None
    return RecipeParts(recipe, tokenizer, train, held or None, takes_turns=turns, resumed=resumed)


def chosen_answers(rows: LocatedRows) -> LocatedRows:
    """The chosen answers with their prompts, in the forms of fine-tuning; rows without one are left out, for their
    trainer names them.
    """
    found = list(_chosen(rows))
    return LocatedRows([row for row, _ in found], [place for _, place in found])


def _chosen(rows: LocatedRows) -> Iterator[tuple[dict[str, Any], str]]:
    for row, place in zip(rows, rows.places, strict=True):
        prompt, chosen = row.get("prompt"), row.get("chosen", row.get("completion"))
        if type(prompt) is type(chosen) and isinstance(chosen, (str, list)):
            yield {"prompt": prompt, "completion": chosen}, place
        elif isinstance(chosen, list):
            yield {"messages": chosen}, place
        elif isinstance(chosen, str):
            yield {"prompt": "", "completion": chosen}, place
