"""The table of features: what may be asked for, what it changes, and how its effect shows.

Values of some are drawn together, so that pairs and triples meet. To add a feature, add a row: its check must be
able to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.reliability.combined import checks
from tests.reliability.combined.losses import OF_FUNCTIONS, OF_METHODS
from tests.reliability.combined.recipe import Effect, Feature, Recipe

from windlass.core.optional import is_available

TRAINERS = ("trainer", "sft")
ALL_TRAINERS = (*TRAINERS, "dpo")
NOT_OF_PAIRS = (*TRAINERS, "loop")
LOW_RANK = ("galore_adamw", "apollo_adamw")
# Rounding decides about the sign of an update, or is part of the method.
SIGNS = ("rmsprop", "lion_32bit", "lion_8bit", "adamw_8bit", "muon", "grokadamw", "adafactor", *LOW_RANK)
SCHEDULE_FREE = ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd")
OPTIMIZERS = (
    "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor", "muon", "lion_32bit", "ademamix", "stable_adamw",
    "grokadamw", "adamw_anyprecision", *SCHEDULE_FREE,
    *(("adamw_8bit", "lion_8bit") if is_available("bitsandbytes") else ()),
)  # fmt: skip
IN_BACKWARD = ("lomo", "adalomo")
SCHEDULES = (
    "cosine", "constant", "constant_with_warmup", "cosine_with_restarts", "polynomial", "inverse_sqrt",
    "cosine_with_min_lr", "warmup_stable_decay",
)  # fmt: skip
_SCHEDULE_OPTIONS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 2},
}
PROMPTS = ("prompt", "prefix")
ANY = ("*",)


def argument(name: str, value: Any) -> Callable[[Recipe, str], None]:
    """Set an argument, whatever is asked for."""
    return lambda recipe, asked: recipe.arguments.update({name: value})


def chosen(**of_values: dict[str, Any]) -> Callable[[Recipe, str], None]:
    """Set the arguments that belong to the value."""
    return lambda recipe, value: recipe.arguments.update(of_values[value])


def _model(recipe: Recipe, value: str) -> None:
    recipe.model, recipe.dtype = value, "float32"
    recipe.approximate(1e-4, 1e-5)


# Layouts of axes.
AXES: dict[str, dict[str, int]] = {
    "tp-2": {"tp_size": 2},
    "cp-2": {"cp_size": 2},
    "ep-2": {"ep_size": 2},
    "pp-2": {"pp_size": 2},
    "tp_cp-4": {"tp_size": 2, "cp_size": 2},
    "pp_tp-4": {"pp_size": 2, "tp_size": 2},
    "pp_shard-4": {"pp_size": 2, "dp_shard_size": 2},
}


def _ranks(recipe: Recipe, value: str) -> None:
    recipe.strategy, _, world = value.partition("-")
    recipe.world = int(world)
    recipe.axes = AXES.get(value, {})
    recipe.experts = "ep_size" in recipe.axes
    if recipe.strategy.startswith("zero"):
        recipe.dtype = "float32"
        recipe.approximate(1e-4, 1e-5)


def _device(recipe: Recipe, value: str) -> None:
    recipe.on_processor = False
    recipe.approximate(1e-7)


def _optim(recipe: Recipe, value: str) -> None:
    recipe.arguments["optim"] = value
    if value in LOW_RANK:
        targets = ["up", "down"] if recipe.model == "plain" else ["q_proj", "k_proj", "v_proj", "o_proj"]
        recipe.arguments |= {"optim_target_modules": targets, "optim_args": "rank=4, update_proj_gap=3"}
        recipe.draws |= not recipe.on_processor  # other numbers, or singular vectors of another sign
    if value in SCHEDULE_FREE:
        recipe.arguments["lr_scheduler_type"] = "constant"
    if value == "sgd":
        recipe.arguments["learning_rate"] = 0.1
    if value.startswith("lion"):
        recipe.arguments["learning_rate"] = 1e-3
    recipe.approximate(2e-2 if value in SIGNS else 1e-7)


def _schedule(recipe: Recipe, value: str) -> None:
    recipe.arguments["lr_scheduler_type"] = value
    if value in _SCHEDULE_OPTIONS:
        recipe.arguments["lr_scheduler_kwargs"] = _SCHEDULE_OPTIONS[value]


def _plateau(recipe: Recipe, value: str) -> None:
    options = {"patience": 0, "threshold": 0.5}
    recipe.arguments |= {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": options}


def _warmup(recipe: Recipe, value: str) -> None:
    recipe.arguments["warmup_steps"] = float(value)


def _length(recipe: Recipe, value: str) -> None:
    recipe.arguments |= {"max_steps": -1, "num_train_epochs": float(value.partition("-")[2])}


def _accumulation(recipe: Recipe, value: str) -> None:
    recipe.accumulation = int(value)


def _precision(recipe: Recipe, value: str) -> None:
    recipe.dtype = "float32"
    recipe.arguments |= {value: True}
    # DeepSpeed rounds the weights themselves: one process with bf16 weights differs as much from one under autocast.
    recipe.approximate(1e-1 if recipe.strategy.startswith("zero") else 5e-2, 2e-2)


def _qat(recipe: Recipe, value: str) -> None:
    recipe.arguments["qat"], recipe.dtype = value, "float32"
    recipe.approximate(2e-2 if recipe.on_processor else 5e-2)  # a last bit may move a value to the next step
    recipe.by_hand = None  # what is saved is not rounded


def _full_eval(recipe: Recipe, value: str) -> None:
    recipe.arguments[value] = True
    recipe.approximate(0.0, 2e-2)


def _adapter(recipe: Recipe, value: str) -> None:
    recipe.adapter = value
    recipe.approximate(1e-6, 1e-5)


def _dropout(recipe: Recipe, value: str) -> None:
    recipe.dropout, recipe.draws = float(value), True


def _data(recipe: Recipe, value: str) -> None:
    recipe.data = value


def _datasets(recipe: Recipe, value: str) -> None:
    recipe.data = f"datasets_{value}"


def _workers(recipe: Recipe, value: str) -> None:
    number, _, stay = value.partition("-")
    recipe.arguments |= {"dataloader_num_workers": int(number), "dataloader_persistent_workers": bool(stay)}


def _average(recipe: Recipe, value: str) -> None:
    recipe.average = value


def _loss(recipe: Recipe, value: str) -> None:
    recipe.loss = value
    if value in ("terms", "func_factor"):
        recipe.ragged = recipe.ragged or value == "terms"
    if value == "method_mean" or (recipe.kind == "loop" and value == "terms"):
        recipe.approximate(1e-7)


def _smoothing(recipe: Recipe, value: str) -> None:
    recipe.arguments["label_smoothing_factor"] = float(value)


def _clipping(recipe: Recipe, value: str) -> None:
    recipe.arguments["max_grad_norm"] = float(value)


def _neftune(recipe: Recipe, value: str) -> None:
    recipe.arguments["neftune_noise_alpha"] = float(value)
    recipe.draws = True


def _groups(recipe: Recipe, value: str) -> None:
    part = "head" if recipe.model == "plain" else "lm_head"
    recipe.arguments |= {"optim_groups": {part: {"lr": 3e-3}}}


def _packing(recipe: Recipe, value: str) -> None:
    packed = {"packing": True, "packing_strategy": value, "max_length": 24}
    recipe.arguments |= {"padding_free": True, "max_length": None} if value == "padding_free" else packed
    recipe.by_hand = None if value == "wrapped" else recipe.by_hand


def _images(recipe: Recipe, value: str) -> None:
    recipe.images, recipe.by_hand = True, None  # the formula knows no images
    recipe.arguments["max_length"] = 96 if recipe.arguments.get("packing") else None
    recipe.approximate(1e-4)  # layers norm and rotate in single precision


def _dft(recipe: Recipe, value: str) -> None:
    recipe.arguments["loss_type"] = value
    recipe.by_hand = None


def _pair_loss(recipe: Recipe, value: str) -> None:
    recipe.arguments["loss_type"] = value.split("+")


def _in_a_row(recipe: Recipe, value: str) -> None:
    recipe.arguments[value] = True
    recipe.approximate(1e-5)


def _reference(recipe: Recipe, value: str) -> None:
    if value == "adapter":
        recipe.adapter = "lora"
    recipe.arguments |= {
        "precomputed": {"precompute_ref_log_probs": True},
        "moving": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    }.get(value, {})
    recipe.approximate(1e-6)


def _of_reference(effect: Effect) -> None:
    """What is computed before is the same; what moves, or is the model without an adapter, is another."""
    (checks.losses_are_close if effect.value == "precomputed" else checks.losses_are_others)(effect)


FEATURES = (
    Feature("pair_loss", ("ipo", "hinge", "sigmoid+sft"), _pair_loss, checks.losses_are_others, ("dpo",),
            compared=True),
    Feature("pairs_in_a_row", ("padding_free",), _in_a_row, checks.rows_are_shorter, ("dpo",), compared=True),
    Feature("reference", ("precomputed", "moving", "adapter"), _reference, _of_reference, ("dpo",), compared=True,
            apart={"accumulation": ("adapter",)}),  # whose reference runs the same layers
    Feature("answers", ("prompts",), argument("eval_prompts", ["2 5 8", "4"]), checks.losses_are_the_same, ("sft",),
            compared=True, needs={"evaluation": "steps"}, apart={"best": ANY, "plateau": ANY, "prompts": ANY}),
    Feature("model", ("llama",), _model, checks.nothing),
    Feature(
        "ranks",
        ("ddp-2", "ddp-3", "fsdp2-2", "fsdp2-3", *AXES)
        + (("zero1-2", "zero2-2", "zero3-2") if is_available("deepspeed") else ()),
        _ranks,
        checks.weights_are_spread,
        apart={"images": ("ep-2",)},  # whose model has no experts
    ),
    # Drawn only where it is asked for: see `draw`.
    Feature("device", ("accelerator",), _device, checks.weights_are_on_the_accelerator, apart={"ranks": ANY}),
    Feature(
        "optim",
        OPTIMIZERS,
        _optim,
        checks.optimizer_is_another,
        # Prompts are no matrices of a layer: with Muon, AdamW updates them.
        apart={
            "average": SCHEDULE_FREE, "schedule": SCHEDULE_FREE, "plateau": SCHEDULE_FREE, "prompts": ("muon",),
        },
        compared=True,
    ),
    # Without gradients that could be looked at, or in need of the model's layers.
    Feature("special", (*LOW_RANK, *IN_BACKWARD), _optim, checks.optimizer_is_another, TRAINERS, compared=True,
            apart={"optim": ANY, "clipping": ANY, "adapter": ANY, "prompts": ANY, "accumulation": IN_BACKWARD}),
    Feature("schedule", SCHEDULES, _schedule, checks.rates_are_those_of_the_formula),
    Feature("plateau", ("loss",), _plateau, checks.rates_fall, TRAINERS, needs={"evaluation": "steps"},
            apart={"schedule": ANY, "warmup": ANY}),
    Feature("warmup", ("2", "0.25"), _warmup, checks.rates_are_those_of_the_formula, ALL_TRAINERS),
    Feature(
        "length", ("epochs-2", "epochs-1.5"), _length, checks.updates_are_those_of_the_rows, TRAINERS,
        apart={"data": ANY, "packing": ANY},  # a stream has no length; packed rows are fewer
    ),
    Feature("accumulation", ("2", "3"), _accumulation, checks.micro_batches_are_counted),
    Feature("precision", ("bf16", "fp16"), _precision, checks.layers_compute_in_it),
    *(
        [Feature("qat", ("int8", "int8_weight_only"), _qat, checks.losses_are_others, ALL_TRAINERS, compared=True,
                 needs={"model": "llama"}, apart={"adapter": ANY, "prompts": ANY, "reference": ANY})]
        if is_available("torchao") else []
    ),
    Feature(
        "full_eval", ("bf16_full_eval",), _full_eval, checks.evaluation_is_coarser, TRAINERS, compared=True,
        apart={"evaluation": ANY, "best": ANY, "precision": ANY},
    ),
    Feature("adapter", ("lora", "dora", "ia3", "lora_and_head"), _adapter, checks.base_is_frozen, NOT_OF_PAIRS),
    Feature("prompts", PROMPTS, _adapter, checks.base_is_frozen, TRAINERS, needs={"model": "llama"},
            apart={"adapter": ANY, "packing": ANY, "recompute": ANY, "groups": ANY}),
    Feature("dropout", ("0.2",), _dropout, checks.losses_are_others, NOT_OF_PAIRS, compared=True),
    Feature(
        "packing", ("bfd", "bfd_split", "wrapped", "padding_free"), _packing, checks.rows_are_joined, ("sft",),
        compared=True,
        # One micro-batch holds all rows of the first three: there is nothing to accumulate.
        apart={"data": ANY, "accumulation": ("bfd", "bfd_split", "wrapped")},
    ),
    Feature("images", ("some",), _images, checks.losses_are_others, ("sft",), compared=True,
            apart={"datasets": ANY, "loss": ANY, "answers": ANY, "prompts": ANY}),
    Feature("data", ("stream", "stateful_stream"), _data, checks.losses_are_others, ("trainer", "loop"),
            compared=True),
    Feature("datasets", ("rows", "stream"), _datasets, checks.nothing, TRAINERS,
            apart={"data": ANY, "length": ANY, "order": ANY, "workers": ("stream",), "packing": ("stream",)}),
    Feature("workers", ("1", "2", "2-stay"), _workers, checks.losses_are_the_same, compared=True,
            apart={"data": ("1", "2", "2-stay")}),
    Feature("average", ("ema", "swa"), _average, checks.weights_are_the_average, TRAINERS, compared=True),
    Feature(
        "loss", (*OF_FUNCTIONS, *OF_METHODS), _loss, checks.losses_are_those_of_the_function, TRAINERS, compared=True,
        apart={"smoothing": ANY, "prompts": ANY, "packing": ANY},
    ),
    Feature("terms", ("terms", "func_factor"), _loss, checks.losses_are_those_of_the_function, ("loop",)),
    Feature("smoothing", ("0.1",), _smoothing, checks.losses_are_others, TRAINERS, compared=True),
    Feature("clipping", ("0.001",), _clipping, checks.norms_are_clipped),
    Feature(
        "recompute",
        ("all", "every_2", "gradient_checkpointing"),
        chosen(
            all={"activation_checkpointing": True},
            every_2={"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
            gradient_checkpointing={"gradient_checkpointing": True},
        ),
        checks.layers_run_again,
        ALL_TRAINERS,
        compared=True,
    ),
    Feature("neftune", ("5",), _neftune, checks.losses_are_others, TRAINERS, compared=True,
            needs={"model": "llama"}),
    Feature("groups", ("head",), _groups, checks.groups_have_their_rate, TRAINERS, apart={"adapter": ANY}),
    Feature(
        "layer_decay", ("0.5",), argument("layerwise_lr_decay", 0.5),
        checks.layers_have_their_rates, TRAINERS, apart={"groups": ANY, "prompts": ANY},
    ),
    Feature(
        "order", ("sequential", "group_by_length"),
        lambda recipe, value: recipe.arguments.update(train_sampling_strategy=value),
        checks.losses_are_others, TRAINERS, compared=True,
        # Of these few rows it changes the order in a batch alone: an accelerator sums them to the same bits.
        apart={"data": ANY, "packing": ANY, "device": ("group_by_length",)},
    ),
    Feature(
        "evaluation",
        ("steps", "epoch", "start"),
        chosen(
            steps={"eval_strategy": "steps", "eval_steps": 2},
            epoch={"eval_strategy": "epoch"},
            start={"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
        ),
        checks.evaluations_are_logged,
        ALL_TRAINERS,
    ),
    Feature(
        "saving",
        ("each", "epoch", "waiting", "one", "no"),
        chosen(
            each={"save_steps": 1},
            epoch={"save_strategy": "epoch"},
            waiting={"save_in_background": False},
            one={"save_steps": 1, "save_total_limit": 1},
            no={"save_strategy": "no"},
        ),
        checks.checkpoints_are_there,
        ALL_TRAINERS,
        apart={"best": ("no", "epoch", "each", "one")},
    ),
    Feature("save_best", ("loss",), chosen(loss={"save_strategy": "best", "metric_for_best_model": "loss"}),
            checks.nothing, TRAINERS, needs={"evaluation": "steps"}, apart={"saving": ANY, "best": ANY}),
    Feature("saves", ("1", "waiting"), chosen(**{"1": {"save_steps": 1}, "waiting": {"save_in_background": False}}),
            checks.nothing, ("loop",)),
    Feature(
        "best", ("kept", "two"),
        chosen(
            kept={"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1},
            two={"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": None,
                 "keep_last": 1, "keep_best": 2},
        ),
        checks.best_is_loaded, TRAINERS, needs={"evaluation": "steps"},
    ),
    Feature(
        "parts", ("SHARDED_STATE_DICT",),
        lambda recipe, value: recipe.arguments.update(fsdp_config={"state_dict_type": value}),
        checks.nothing, needs={"ranks": "fsdp2-2"},
    ),
    Feature("weight_decay", ("0.1",), argument("weight_decay", 0.1), checks.losses_are_others, ALL_TRAINERS,
            compared=True),
    Feature("drop_last", ("yes",), argument("dataloader_drop_last", True), checks.losses_are_others, TRAINERS,
            compared=True, apart={"data": ANY, "datasets": ANY, "packing": ANY, "fitting": ANY}),
    Feature("fitting", ("yes",), argument("auto_find_batch_size", True), checks.losses_are_the_same, TRAINERS,
            compared=True),
    Feature("tokens", ("non_padding",), argument("include_num_input_tokens_seen", "non_padding"),
            checks.tokens_are_counted, TRAINERS),
    Feature("loss_type", ("dft",), _dft, checks.losses_are_others, ("sft",), compared=True,
            apart={"loss": ANY, "smoothing": ANY}),
    Feature("logging", ("3",), argument("logging_steps", 3),
            checks.losses_are_means, ALL_TRAINERS, compared=True, apart={"best": ANY, "evaluation": ANY}),
)  # fmt: skip
BY_NAME = {feature.name: feature for feature in FEATURES}
