"""The depth of parameters: how many layers of a model are above each."""

from __future__ import annotations

from torch import nn

from windlass.core.errors import ConfigError, Problem


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
