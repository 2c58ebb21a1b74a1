"""Parameter groups: which parameters decay, and which have a learning rate or a weight decay of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ConfigError, Problem, did_you_mean, refuse
from windlass.optim.option_ranges import has_range, outside_range

# By name as well as by type: models have norm classes of their own (LlamaRMSNorm, T5LayerNorm, ...).
_KEPT_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # every batch and instance norm
)


def decay_parameter_names(model: nn.Module, norms: tuple[type[nn.Module], ...] = _NORMS) -> list[str]:
    """Names of the parameters that weight decay applies to: of `parameter_names` all but norms and biases.

    Left out: parameters of norms (torch's types and classes named ...Norm that hold vectors; or those in `norms`), and
    those with bias or norm in their name.
    """
    # By type and not by instance, because `parameter_names` leaves modules out with `isinstance`.
    own = {type(module) for module in model.modules() if _is_norm(module)} if norms is _NORMS else ()
    return parameter_names(model, (*norms, *own), [_KEPT_NAMES])


def _is_norm(module: nn.Module) -> bool:
    """A model's own norm, whatever it is called in the model."""
    held = list(module.parameters())
    # Vectors only: a class such as an adaptive norm may hold whole linear layers, and their matrices decay.
    return type(module).__name__.endswith("Norm") and bool(held) and all(p.dim() < 2 for p in held)


def parameter_names(
    model: nn.Module,
    without_types: tuple[type[nn.Module], ...],
    without_names: Sequence[re.Pattern[str]] = (),
) -> list[str]:
    """Names of the model's parameters, submodules before their parents' own parameters.

    Args:
        without_types: modules inside the model whose parameters are left out.
        without_names: patterns that are searched for in lower-case names, in those relative to each submodule too.
    """
    names: list[str] = []
    for child_name, child in model.named_children():
        if not isinstance(child, without_types):
            inner = parameter_names(child, without_types, without_names)
            names += [f"{child_name}.{name}" for name in inner]
    # Parameters that the module holds itself are in no child.
    names += list(model._parameters)
    return [name for name in names if not any(pattern.search(name.lower()) for pattern in without_names)]


def parameter_groups(
    model: nn.Module, plan: OptimizerPlan, decaying: list[str] | None = None
) -> list[dict[str, Any]]:
    """The groups of a run: the parameters that decay and those that do not, each in the model's order, then those of
    each pattern in `plan.groups`; split by layer if the learning rate differs between layers.

    Scripts address the first two by their position, so both exist if one is empty. Parameters of a pattern that sets no
    weight decay are in two groups as well. Raises ConfigError if a pattern matches no trainable parameter, or two match
    the same one. `decaying`: names in the place of `decay_parameter_names`.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    pattern_of = _matched(trainable, plan.groups)
    names = set(decay_parameter_names(model) if decaying is None else decaying)
    rows = []
    # None: the parameters that no pattern matches.
    everything: list[tuple[str | None, dict[str, Any]]] = [(None, {}), *plan.groups.items()]
    for pattern, options in everything:
        own = [name for name in trainable if pattern_of.get(name) == pattern]
        if "weight_decay" in options:
            rows.append((own, options))
            continue
        halves = (
            ([n for n in own if n in names], plan.weight_decay),
            ([n for n in own if n not in names], 0.0),
        )
        rows += [
            (half, {"weight_decay": decay, **options}) for half, decay in halves if half or pattern is None
        ]
    if plan.layer_decay != 1:
        rows = list(_by_layer(model, plan, rows))
    return [{"params": [trainable[name] for name in own], **options} for own, options in rows]


def arranged(model: nn.Module, cls: Callable[..., Any], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups as `cls.arrange(model, groups)` divides them further, for classes that treat parts of a model
    differently.
    """
    arrange: Callable[..., list[dict[str, Any]]] | None = getattr(cls, "arrange", None)
    return groups if arrange is None else arrange(model, groups)


def check_group_options(groups: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Check that the optimizer has each option that a pattern sets, with such values; `defaults` are its options."""
    refuse(
        Problem(f"optim_groups[{pattern!r}].{key}", value, fix)
        for pattern, options in groups.items()
        for key, value in options.items()
        if (fix := _why_not(key, value, defaults))
    )


def _why_not(key: str, value: Any, defaults: Mapping[str, Any]) -> str:
    """What is wrong with an option of a group; empty if nothing is."""
    if key not in defaults:
        return f"a group takes {', '.join(defaults)}{did_you_mean(key, defaults)}"
    default = defaults[key]
    if isinstance(default, tuple) and not (
        isinstance(value, list | tuple)
        and len(value) == len(default)
        # torch's Adafactor has None among the numbers of `eps`.
        and all(_is_number(own) or own is None is usual for own, usual in zip(value, default, strict=True))
    ):
        return f"must be {len(default)} numbers, as {default}"
    if isinstance(default, bool | str) and not isinstance(value, type(default)):
        return f"must be {'true or false' if isinstance(default, bool) else 'text'}, as {default}"
    if value is None and default is None:
        return ""
    if (_is_number(default) or has_range(key)) and not _is_number(value):
        return "must be a number" + ("" if default is None else f", as {default}")
    return outside_range(key, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _matched(trainable: Mapping[str, Tensor], groups: Mapping[str, Any]) -> dict[str, str]:
    """Name of a parameter -> the pattern that is found in it."""
    found: dict[str, str] = {}
    problems = []
    for pattern in groups:
        matching = [name for name in trainable if re.search(pattern, name)]
        if not matching:
            examples = ", ".join(list(trainable)[:4])
            words = {word: None for name in trainable for word in (name, *name.split("."))}
            fix = f"matches no trainable parameter{did_you_mean(pattern, words)}; names are {examples}, ..."
            problems.append(Problem("optim_groups", pattern, fix))
        for name in matching:
            if name in found:
                fix = f"matches {name!r}, which {found[name]!r} matches too; make one of them narrower"
                problems.append(Problem("optim_groups", pattern, fix))
                # One problem for each pair of patterns is enough; every shared parameter would repeat it.
                break
            found[name] = pattern
    refuse(problems)
    return found


def _by_layer(
    model: nn.Module, plan: OptimizerPlan, rows: Sequence[tuple[list[str], dict[str, Any]]]
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Each row split by layer, with the learning rate `lr * layer_decay ** (layers above)`."""
    above = layers_above(model)
    for own, options in rows:
        # A pattern's own rate is the peak that decays from layer to layer, not the end of it.
        peak = options.get("lr", plan.learning_rate)
        for count in sorted({above[name] for name in own}, reverse=True):
            fitting = [name for name in own if above[name] == count]
            yield fitting, {**options, "lr": peak * plan.layer_decay**count}


def layers_above(model: nn.Module) -> dict[str, int]:
    """Name of each parameter -> the number of layers between it and the output.

    Layers are the members of the model's outermost `nn.ModuleList`s: 1 for the last, 2 for the one before, and so on.
    Parameters that are defined after the layers (the final norm, the head) have 0. Embeddings, and what else is defined
    before the layers, have one more than the first layer of the longest list. Raises ConfigError if the model has no
    such list.
    """
    stacks: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer in stacks)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            stacks[name] = len(module)
    if not stacks:
        fix = "the model has no layers in an nn.ModuleList; set learning rates by name with optim_groups"
        raise ConfigError(Problem("layerwise_lr_decay", "", fix))
    bottom = max(stacks.values()) + 1
    # By identity: the weight of an embedding that is defined after the layers, or that a head shares, is still
    # one of the lowest layer.
    embeddings = {
        id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    counts: dict[str, int] = {}
    passed = False  # the first list of layers
    for name, parameter in model.named_parameters():
        stack = next((outer for outer in stacks if name.startswith(outer + ".")), None)
        if stack is not None:
            passed = True
            counts[name] = stacks[stack] - int(name[len(stack) + 1 :].split(".")[0])
        else:
            counts[name] = bottom if id(parameter) in embeddings or not passed else 0
    return counts
