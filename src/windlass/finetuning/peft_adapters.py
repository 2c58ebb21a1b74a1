"""Adapters of peft on a model: checks before they are made, and what a quantized base needs."""

from __future__ import annotations

import contextlib
import copy
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from windlass.checkpoint.adapters import peft_library
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.package_remarks import hidden_deprecations
from windlass.core.tensors import count_elements
from windlass.transforms.first_rank import has_weights

logger = get_job_logger(__name__)

_PURPOSE = "train adapters"
_SHOWN = 8
HEADS = ("score", "classifier")  # of sequence classifiers
_FUSED = 3  # dimensions of the weights of several experts: experts, outputs, inputs
# Models that have the hooks: the method of transformers adds them again at each call.
_LET_IN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_peft_model(model: Any) -> bool:
    """Return True if adapters of peft are on the model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def predicts_first_labels(model: Any) -> bool:
    """True if learnt prompts are embedded before each row, so that the first label of a row is predicted, too.

    Learnt prefixes are keys and values, and predict nothing.
    """
    config = getattr(model, "active_peft_config", None)
    kind = str(getattr(getattr(config, "peft_type", None), "value", None))
    return bool(getattr(config, "is_prompt_learning", False)) and kind != "PREFIX_TUNING"


def is_quantized(model: Any) -> bool:
    """Return True if the weights of the model are stored in fewer bits than they are computed in."""
    return getattr(model, "quantization_method", None) is not None


def with_head(classifier: nn.Module, labels: int, peft_config: Any) -> Any:
    """Return the adapter's configuration with the head of `classifier` among what is trained; None without an adapter.
    Raises ConfigError if it has another number of outputs than `labels`, or the adapter is of another task.
    """
    outputs = getattr(getattr(classifier, "config", None), "num_labels", labels)
    if outputs != labels:
        fix = f"load the model with num_labels={labels}; a reward is one number"
        raise ConfigError(Problem("model.config.num_labels", outputs, fix))
    task = getattr(peft_config, "task_type", None)
    if task not in (None, "SEQ_CLS"):
        fix = "the model is a sequence classifier, without methods that this task needs; use 'SEQ_CLS'"
        raise ConfigError(Problem("peft_config.task_type", task, fix))
    heads = [name for name in HEADS if hasattr(classifier, name)]
    saved = list(getattr(peft_config, "modules_to_save", None) or ())
    if peft_config is None or not heads or set(heads) & set(saved):
        return peft_config
    logger.info("the head %r is trained beside the adapter", heads[0])
    adapter = copy.copy(peft_config)
    adapter.modules_to_save = [*saved, *heads]
    return adapter


def add_adapter(model: nn.Module, peft_config: Any, new_tokens: list[int]) -> nn.Module:
    """Put an adapter on `model` and freeze the rest.

    Args:
        peft_config: a `PeftConfig`, such as `LoraConfig`.
        new_tokens: ids that were added to the vocabulary; their embeddings are trained too.

    Raises:
        TypeError: it is not a `PeftConfig`.
        ValueError: the model has adapters already.
        ConfigError: the modules that it names are not in the model, or the way in which it begins would be lost.
    """
    peft = peft_library(_PURPOSE)
    if not isinstance(peft_config, peft.PeftConfig):
        raise TypeError(
            "`peft_config` must be a `peft.PeftConfig` instance (e.g. `peft.LoraConfig`), got "
            f"{type(peft_config).__name__}"
        )
    if is_peft_model(model):
        raise ValueError(
            "You passed a `PeftModel` instance together with a `peft_config` to the trainer. First merge and unload "
            "the existing adapter, save the resulting base model, and pass that with the new `peft_config`"
        )
    refuse_beginnings(peft_config)
    if getattr(peft_config.peft_type, "value", None) == "ADALORA":
        logger.warning(
            "peft_config=AdaLoraConfig: ranks stay at init_r until a callback's on_optimizer_step calls "
            "model.base_model.update_and_allocate(state.global_step), which no trainer does; checkpoints do not hold "
            "what it measures"
        )
    if new_tokens:
        _train_new_tokens(model, peft_config, new_tokens)
    _target_fused_parameters(model, peft_config)
    _check_targets(model, peft_config)
    if is_quantized(model):
        prepare_quantized(model)
    every_layer = getattr(peft_config, "target_modules", None) == "all-linear"  # peft replaces it by names
    # As the script gave it, for a second adapter with the experts: peft writes its own findings into what it gets.
    given = copy.deepcopy(peft_config)
    adapted = _adapted(model, peft_config)
    _check_parameters(adapted, peft_config)
    return _reach_experts(adapted, given) if every_layer else adapted


def refuse_beginnings(peft_config: Any, name: str = "peft_config") -> None:
    """Refuse initial weights that need data, which peft would replace by others without an error, and those that leave
    a base that no other process has. `name`: of the configuration, where the user wrote it.
    """
    begins = getattr(peft_config, "init_lora_weights", None)
    if begins == "eva":
        fix = (
            "needs activations of the model: model = peft.get_peft_model(model, peft_config), then "
            "peft.initialize_lora_eva_weights(model, batches), and pass the model without peft_config"
        )
        raise ConfigError(Problem(f"{name}.init_lora_weights", begins, fix))
    if isinstance(begins, str) and begins.startswith("pissa_niter_"):
        fix = (
            "draws the base that is left at random, so that the saved adapter would be loaded onto another one; use "
            "'pissa', whose decomposition is exact"
        )
        raise ConfigError(Problem(f"{name}.init_lora_weights", begins, fix))


def _adapted(model: nn.Module, peft_config: Any) -> nn.Module:
    # An adapter may begin with values that are computed from the weights. It comes with them.
    where = contextlib.nullcontext() if has_weights(model) else torch.device("meta")
    try:
        with hidden_deprecations(), where:
            adapted: nn.Module = peft_library(_PURPOSE).get_peft_model(model, peft_config)
    except ValueError as error:
        if "not found in the base model" in str(error):
            raise ConfigError(_target_problem(model, peft_config, "matches no module")) from error
        if "specify `target_modules`" in str(error):
            raise ConfigError(
                _target_problem(model, peft_config, "is needed: peft has no default")
            ) from error
        raise
    return adapted


def prepare_quantized(model: nn.Module) -> None:
    """Freeze a quantized base, and keep its norms in float32 (arXiv:2305.14314). A second call changes nothing.

    Biases and norms are one-dimensional; embeddings and the head keep their dtype.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 1 and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.to(torch.float32)  # ties refer to this parameter


def let_gradients_in(model: nn.Module) -> None:
    """Let gradients flow from the first block on: reentrant recomputation drops them if no input of a block requires
    one. A second call changes nothing.
    """
    enable = getattr(model, "enable_input_require_grads", None)
    if enable is not None and model not in _LET_IN:
        _LET_IN.add(model)
        enable()


def describe_trained(model: nn.Module) -> str:
    """How many of a model's parameters are trained."""
    parameters = list(model.parameters())
    trained, total = count_elements(p for p in parameters if p.requires_grad), count_elements(parameters)
    return f"training {trained:,} of {total:,} parameters ({trained / max(total, 1):.2%})"


def _train_new_tokens(model: Any, peft_config: Any, new_tokens: list[int]) -> None:
    """Train the rows of tokens that were added, and the output layer, under the names that the model has for them."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    embedding, head = (_name_of(model, layer) for layer in layers)
    indices = peft_config.trainable_token_indices
    if not isinstance(indices, dict):
        indices = {} if indices is None else {embedding: list(indices)}
    # Once each: a script may use one configuration for several trainers.
    indices[embedding] = list(dict.fromkeys([*indices.get(embedding, []), *new_tokens]))
    peft_config.trainable_token_indices = indices
    saved = [*(peft_config.modules_to_save or ())]
    # A head that is the embedding gets the rows from there, and peft trains it in one of the two ways alone.
    if head not in saved and layers[0].weight is not layers[1].weight:
        logger.warning(
            "the chat template added %d tokens, so the output layer is trained too: %r is added to modules_to_save",
            len(new_tokens),
            head,
        )
        peft_config.modules_to_save = [*saved, head]


def _name_of(model: nn.Module, layer: nn.Module) -> str:
    """The last part of the name of a layer."""
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[layer].rpartition(".")[2]


# --- target modules ---------------------------------------------------------------------------------------------------


def _check_targets(model: nn.Module, peft_config: Any) -> None:
    """Raise ConfigError if no listed module, to adapt or to train as a whole, is one of the model; warn of each that is
    not.
    """
    names = [name for name, _ in model.named_modules()]
    targets, whole = (getattr(peft_config, field, None) for field in ("target_modules", "modules_to_save"))
    if isinstance(targets, (list, set, tuple)) and targets:
        missing = [t for t in targets if not any(_ends(name, t) for name in names)]
        if len(missing) == len(targets) and not getattr(peft_config, "target_parameters", None):
            raise ConfigError(_target_problem(model, peft_config, "matches no module"))
        _warn_of_missing(model, "target_modules", missing, "the others get adapters")
    if whole:
        # peft compares letters here, and says nothing.
        missing = [t for t in whole if not any(name.endswith(t) for name in names)]
        if len(missing) == len(whole):
            fix = f"matches no module for {type(model).__name__}; leave it out, or name modules"
            raise ConfigError(Problem("peft_config.modules_to_save", whole, fix))
        _warn_of_missing(model, "modules_to_save", missing, "the others are trained as a whole")


def _check_parameters(adapted: Any, peft_config: Any) -> None:
    """Raise ConfigError if no parameter that is listed got an adapter; warn of each that did not."""
    targets = getattr(peft_config, "target_parameters", None) or ()
    missing = [
        t for t in targets if not any(_ends(n, t) for n in adapted.base_model.targeted_parameter_names)
    ]
    if targets and len(missing) == len(targets):
        fix = f"matches no parameter of {type(adapted.get_base_model()).__name__}; leave it out, or name parameters"
        raise ConfigError(Problem("peft_config.target_parameters", list(targets), fix))
    _warn_of_missing(adapted.get_base_model(), "target_parameters", missing, "the others get adapters")


def _warn_of_missing(model: nn.Module, field: str, missing: list[str], others: str) -> None:
    if missing:
        logger.warning(
            "peft_config.%s: no %s of %s is named %s; %s",
            field,
            "parameter" if field == "target_parameters" else "module",
            type(model).__name__,
            ", ".join(map(repr, sorted(missing))),
            others,
        )


def _reach_experts(adapted: Any, given: Any) -> nn.Module:
    """Put adapters on the experts that "all-linear" left out as well; warn of those that stay frozen.

    Args:
        adapted: the model with adapters on its linear layers. The experts of some models have theirs by then, because
            peft converts the names of their layers.
        given: the configuration before peft replaced its names.
    """
    frozen = _frozen_experts(adapted)
    if not frozen:
        return adapted  # type: ignore[no-any-return]
    names = sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in frozen})
    targets = sorted({re.split(r"\.\*\.", name)[-1] for name in names})
    reason = _why_not_on_parameters(given)
    if reason is not None:
        logger.warning(
            'peft_config.target_modules="all-linear": %s are no linear layers and stay frozen: adapters of parameters '
            "need %s. With that they are trained too, or by themselves by LoraConfig(target_parameters=%r)",
            ", ".join(names),
            reason,
            targets,
        )
        return adapted  # type: ignore[no-any-return]
    given.target_parameters = [*(given.target_parameters or ()), *targets]
    logger.info('peft_config.target_modules="all-linear": the experts get adapters too: %s', ", ".join(names))
    return _adapted(adapted.unload(), given)


def _why_not_on_parameters(peft_config: Any) -> str | None:
    """What peft's adapters of parameters need of a configuration that does not have it; None if it has all."""
    if not hasattr(peft_config, "target_parameters"):
        return "peft_config=LoraConfig(...)"
    needed = {"lora_dropout": 0.0, "lora_bias": False, "use_dora": False, "fan_in_fan_out": False}
    for name, value in needed.items():
        if getattr(peft_config, name, value) != value:
            return f"{name}={value}"
    if peft_config.init_lora_weights not in (True, False, "gaussian"):
        return "init_lora_weights=True, False or 'gaussian'"
    return None


def _target_fused_parameters(model: nn.Module, peft_config: Any) -> None:
    """Name the parameters that listed targets mean in `target_parameters`: weights of experts are no modules."""
    targets = getattr(peft_config, "target_modules", None)
    if not isinstance(targets, (list, set, tuple)) or not hasattr(peft_config, "target_parameters"):
        return
    fused = [name for name, _, _ in _fused_weights(model)]
    modules = [name for name, _ in model.named_modules()]
    meant = {t: [name for name in fused if _ends(name, t)] for t in targets}
    only = sorted(t for t, names in meant.items() if names and not any(_ends(name, t) for name in modules))
    if not only:
        return
    reason = _why_not_on_parameters(peft_config)
    if reason is not None:
        fix = f"are weights of experts, whose adapters need {reason}; change it, or leave them out"
        raise ConfigError(Problem("peft_config.target_modules", only, fix))
    peft_config.target_modules = sorted(set(targets) - set(only))
    peft_config.target_parameters = sorted({*(peft_config.target_parameters or ()), *only})


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _frozen_experts(adapted: Any) -> list[str]:
    """Names of weights of several layers in one parameter that are not trained and have no adapter."""
    layers = [layer for layer in adapted.modules() if hasattr(layer, "parameter_name")]
    wrapped = {(layer.get_base_layer(), layer.parameter_name) for layer in layers}
    return [
        name
        for name, module, weight in _fused_weights(adapted.get_base_model())
        if not weight.requires_grad and (module, name.rpartition(".")[2]) not in wrapped
    ]


def _fused_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Weights of several layers in one parameter, with their names and owners: experts of a mixture."""
    return (
        (f"{owner}.{name}", module, weight)
        for owner, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn")  # a convolution has three dimensions too
        for name, weight in module.named_parameters(recurse=False)
        if weight.dim() == _FUSED
    )


def _target_problem(model: nn.Module, peft_config: Any, reason: str) -> Problem:
    targets = getattr(peft_config, "target_modules", None)
    shown = sorted(targets) if isinstance(targets, (set, frozenset)) else targets
    found = ", ".join(_linear_names(model))
    fix = f"{reason} for {type(model).__name__}; use names such as {found}, or 'all-linear'"
    return Problem("peft_config.target_modules", shown, fix)


def _linear_names(model: nn.Module) -> Iterable[str]:
    """The most frequent last names of linear layers."""
    counts = Counter(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "Linear4bit", "Linear8bitLt")
    )
    return [name for name, _ in counts.most_common(_SHOWN)]
