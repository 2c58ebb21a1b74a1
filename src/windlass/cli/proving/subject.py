"""What is proven: the kind of model and of training that a recipe, or the configuration of a model, describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.cli.proving.small_training import ACCUMULATION, SmallTraining
from windlass.config import kinds
from windlass.config.arguments import TrainingArguments
from windlass.config.parallel import rows_training as rows
from windlass.config.parallel.keys import Settings
from windlass.config.parallel.parallel_plan import is_sharded, uses_deepspeed
from windlass.config.parallel.sources import from_arguments
from windlass.config.plan import SCHEDULES, usual_stages
from windlass.core.errors import ConfigError, ModelError, Problem, first_line, named
from windlass.core.locations import at_home
from windlass.core.optional import require
from windlass.proofs.record import Claim, arguments_that_matter, check_adapter
from windlass.proofs.small_config import AxisLayout
from windlass.recipes.modelling import config_of
from windlass.recipes.recipe import check_draft, read_draft, training_arguments
from windlass.recipes.schema import Recipe
from windlass.recipes.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Subject:
    """What is proven."""

    name: str  # of the recipe or the file
    config: Any  # the configuration of its model
    layout: AxisLayout  # the one that the recipe asks for
    facts: dict[str, Any]  # see `arguments_that_matter`

    @property
    def module(self) -> str:
        """The module of transformers with the model."""
        package, _, name = type(self.config).__module__.rpartition(".")
        return f"{package}.{name.replace('configuration_', 'modeling_')}"

    def trial(self, claim: Claim, layout: AxisLayout, joined: bool) -> SmallTraining:
        """The training of the small model on some of the axes of the claim; see `SmallTraining.joined`."""
        batches = ACCUMULATION * claim.layout.data_ranks
        return SmallTraining(claim.config, layout, batches, self.facts, joined)

    def describe(self, claim: Claim) -> str:
        """A line about the small model."""
        small = type(self.config).from_dict(claim.config)
        sizes = {
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "wide": "hidden_size",
            "tokens": "vocab_size",
        }
        text = ", ".join(
            f"{getattr(small, name)} {what} for {getattr(self.config, name):,}"
            for what, name in sizes.items()
        )
        return f"model {self.config.model_type}: {text}\nlayout {claim.layout}: {claim.layout.processes} processes\n"


def find_subject(name: str | None, overrides: Sequence[str]) -> Subject:
    """Read a recipe, or the `config.json` of a model. Raises ConfigError or ModelError for what cannot be proven."""
    path = at_home(name or "")
    if name is not None and (path.suffix == ".json" or path.is_dir()):
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file() or file.name != "config.json":
            fix = "give the config.json of a model, or its folder"
            raise ConfigError(Problem("RECIPE", name, f"is not the configuration of a model; {fix}"))
        args = TrainingArguments(max_grad_norm=1.0)
        facts = arguments_that_matter(args, positions=_of_model(overrides))
        return Subject(name, _saved_config(str(file.parent)), AxisLayout(()), facts)
    draft = read_draft(name, overrides)
    recipe = check_draft(draft, opens_files=False)
    if not TASKS[recipe.task].provable:
        known = ", ".join(name for name, task in TASKS.items() if task.provable)
        fix = f"is not proven yet; tasks that are: {known}"
        raise ConfigError(Problem(draft.label("task"), recipe.task, fix))
    args = training_arguments(recipe.training, recipe.task)
    # It takes torch, which help does not wait for.
    from windlass.recipes.fine_tuning import build_adapter

    if (adapter := build_adapter(recipe)) is not None:
        check_adapter(adapter)
    settings = from_arguments(args)
    facts = arguments_that_matter(
        args,
        adapter is not None,
        settings.value(rows.TENSOR_POSITIONS),
        _pipeline(settings),
        is_sharded(settings) and settings.value(rows.FSDP_RECOMPUTE),
    )
    return Subject(name or "the default recipe", _config(recipe), _layout(args), facts)


def _pipeline(settings: Settings) -> tuple[str, int]:
    """The schedule of a pipeline, by the name of its class, and the stages of each rank."""
    schedule = next(name for name in SCHEDULES if name.lower() == settings.value(rows.PP_SCHEDULE))
    return schedule, settings.value(rows.PP_STAGES) or usual_stages(schedule)


def _of_model(overrides: Sequence[str]) -> bool:
    """Whether positions are divided, which alone can be said beside the configuration of a model."""
    key = "parallel.tp_sequence_parallel"
    given = dict(word.split("=", 1) for word in overrides)
    if unknown := given.keys() - {key}:
        fix = f"belongs to a recipe, and this is the configuration of a model; it takes {key} alone"
        raise ConfigError(Problem(min(unknown), given[min(unknown)], fix))
    try:
        return bool(kinds.flag(given.get(key, "false")))
    except ValueError as error:
        raise ConfigError(Problem(key, given[key], str(error))) from None


def _config(recipe: Recipe) -> Any:
    """The configuration of the model that a recipe trains."""
    of_recipe = recipe.model.config
    if recipe.model.name is not None:
        return _saved_config(recipe.model.name)
    if of_recipe is None:
        from windlass.recipes.modelling import base_config

        of_recipe = base_config(recipe.base.config if recipe.base else {})
    trained = recipe.tokenizer.train
    return config_of(of_recipe, {} if trained is None else {"vocab_size": trained.vocab_size})


def _saved_config(name: str) -> Any:
    """The configuration in a folder, or of a model that was downloaded before."""
    transformers = require("transformers", "prove a layout")
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:  # some configurations compute with their values before they check them
        whose = f"the configuration of the model {name!r}"
        if Path(name).is_dir() or not isinstance(error, OSError | ValueError | KeyError):
            raise ModelError(f"{whose} is wrong: {named(error)}") from error
        fix = "give its config.json: windlass prove FOLDER/config.json"
        raise ModelError(f"{whose} is not on this machine; {fix} ({first_line(error)})") from error


def _layout(args: TrainingArguments) -> AxisLayout:
    """The layout that arguments ask for; what only the number of processes decides is 2."""
    settings = from_arguments(args)
    if uses_deepspeed(settings):
        fix = "is not proven, for DeepSpeed computes it; leave it out, or use fsdp"
        raise ConfigError(Problem("training.deepspeed", "set", fix))
    keys = (rows.MESH_REPLICAS, rows.MESH_SHARDS, rows.MESH_EXPERT, *rows.MODEL_AXES)
    layout = AxisLayout.parse(",".join(f"{key.words[-1]}={settings.value(key)}" for key in keys), "parallel")
    # How many shards there are follows from the number of processes, which a recipe does not know.
    if is_sharded(settings) and "dp_shard" not in layout.axes:
        return AxisLayout.of({**dict(layout.sizes), "dp_shard": 2})
    return layout
