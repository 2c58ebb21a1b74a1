"""Activation checkpointing (arXiv:1604.06174): blocks drop their activations and recompute them in the backward.

Gradients and buffers have the same bits as without it: random draws inside a block are repeated from the saved
generator state, with the buffers as they were, and running statistics are not updated twice.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from windlass.core.errors import ConfigError, Problem, refuse
from windlass.transforms.activation_offload import ActivationOffload
from windlass.transforms.blocks import repeated_blocks
from windlass.transforms.mixing import mix
from windlass.transforms.strategy import device_of
from windlass.transforms.tiles import tile_layers

_FIELD = "activation_checkpointing_kwargs"
_PLAIN_OPTIONS = (
    "every_n_layers",
    "offload",
    "selective",
    "tiles",
    "use_reentrant",
    "preserve_rng_state",
    "determinism_check",
)
# What torch's function takes; it hands others on to the block, which may take anything.
_OF_CHECKPOINT = (*_PLAIN_OPTIONS, "context_fn", "debug", "early_stop")
_VALUES: dict[str, tuple[Any, ...]] = {
    "use_reentrant": (True, False),
    "offload": (True, False),
    "determinism_check": ("default", "none"),
}
_OWN_FUNCTION = "_gradient_checkpointing_func"
_ATTENTION = "attention"  # every kernel of it
_KEPT = ("mm", "addmm", "bmm", "baddbmm", "linear", _ATTENTION)


def apply_recompute(
    model: nn.Module, options: Mapping[str, Any] | None = None, blocks: Sequence[nn.Module] = ()
) -> nn.Module:
    """Enable recomputation in `model`, in place.

    A model with a method for it (`activation_checkpointing_enable` or `gradient_checkpointing_enable`, as Hugging
    Face's models have) uses that; in any other module the repeated blocks of its `ModuleList`s and `Sequential`s are
    recomputed. Raises ConfigError if the model does not support it, has no repeated blocks, or an option is unknown.

    Args:
        options: `every_n_layers` (1: each block; n: the first of every n), `offload` (keep inputs of blocks on the
            host), `selective` (True: keep the results of matrix products and attention, which take longest to
            recompute; or names of the operators whose results are kept), `tiles` (names of layers within blocks ->
            tokens that they compute at a time; see `tiles.py`) and arguments of `torch.utils.checkpoint.checkpoint`;
            `use_reentrant` is False by default.
        blocks: the blocks of a module without such a method; empty: its repeated blocks.
    """
    if device_of(model).type == "xla":
        fix = (
            "PyTorch's own recomputation does not run on PyTorch/XLA: leave it out, or shard the model with "
            "fsdp_config={'xla': True, 'xla_fsdp_grad_ckpt': True}"
        )
        raise ConfigError(Problem("activation_checkpointing", True, fix))
    # None is what is left out: torch would take it as re-entrant, in which blocks may get no gradients.
    given = {name: value for name, value in (options or {}).items() if value is not None}
    chosen = {"use_reentrant": False, **given}
    refuse(
        Problem(f"{_FIELD}.{name}", chosen[name], f"must be {' or '.join(map(str, values))}")
        for name, values in _VALUES.items()
        if name in chosen and chosen[name] not in values
    )
    every = chosen.pop("every_n_layers", 1)
    offload = chosen.pop("offload", False)
    # Before blocks are wrapped: the block is then recomputed as a whole, tile by tile within it.
    tiles = chosen.pop("tiles", None)
    if tiles is not None:
        tile_layers(model, tiles)
    selective = chosen.pop("selective", False)
    if selective:
        if chosen["use_reentrant"]:
            fix = "does not work with use_reentrant=True; leave one of the two out"
            raise ConfigError(Problem(f"{_FIELD}.selective", selective, fix))
        kept = _KEPT if selective is True else _operators(selective)
        keeps = functools.partial(_keeps, kept)
        chosen["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keeps)
    switches = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    switch = next((name for name in switches if callable(getattr(model, name, None))), None)
    if switch is not None:
        _use_own_switch(model, switch, chosen, every, offload)
    else:
        _wrap_blocks(model, blocks, chosen, every, offload)
    return model


def recomputes_reentrantly(model: nn.Module) -> bool:
    """Return True if blocks of `model` are recomputed by a backward within the backward.

    Only a model with a method of its own can do so. Hugging Face's models keep the function that their blocks call.
    """
    return any(_is_reentrant(module) for module in model.modules())


def _is_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)  # in full: a law lists such names
    while isinstance(function, functools.partial) and function.func in (_offloaded, _with_own_buffers):
        function = function.args[-1]
    if not getattr(module, "gradient_checkpointing", False) or not isinstance(function, functools.partial):
        return False
    return bool(function.keywords.get("use_reentrant"))


def _operators(given: Any) -> tuple[str, ...]:
    """The names of operators in `given`, which torch has."""
    wrong = [given] if not isinstance(given, (list, tuple)) else [n for n in given if not _is_operator(n)]
    if wrong:
        fix = "must be True, or a list of operators of torch.ops.aten such as ['mm', 'addmm', 'attention']"
        raise ConfigError(Problem(f"{_FIELD}.selective", wrong[0], fix))
    return tuple(given)


def _is_operator(name: Any) -> bool:
    return isinstance(name, str) and (name == _ATTENTION or hasattr(torch.ops.aten, name))


def _keeps(
    kept: tuple[str, ...], context: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Whether selective recomputation keeps the result of an operation."""
    name = operation.name() if hasattr(operation, "name") else str(operation)
    keeps = name.removeprefix("aten::").partition(".")[0] in kept or (
        _ATTENTION in kept and _ATTENTION in name
    )
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


# Models with a method of their own


def _use_own_switch(model: nn.Module, switch: str, chosen: dict[str, Any], every: int, offload: bool) -> None:
    if getattr(model, "supports_gradient_checkpointing", True) is False:
        raise ConfigError(
            Problem("activation_checkpointing", True, f"{type(model).__name__} does not support it")
        )
    enable = getattr(model, switch)
    arguments: dict[str, Any] = {switch.replace("_enable", "_kwargs"): chosen}
    if every != 1:
        if "every_n_layers" not in inspect.signature(enable).parameters:
            fix = f"{type(model).__name__}.{switch} has no such option; a newer release of its library may"
            raise ConfigError(Problem(f"{_FIELD}.every_n_layers", every, fix))
        arguments["every_n_layers"] = every
    enable(**arguments)
    # As transformers' models have one: the function by which a module recomputes.
    found: list[Any] = [module for module in model.modules() if hasattr(module, _OWN_FUNCTION)]
    if offload and not found:
        fix = f"{type(model).__name__}.{switch} sets no {_OWN_FUNCTION} in its modules, through which Windlass offloads"
        raise ConfigError(Problem(f"{_FIELD}.offload", True, fix))
    keeps_statistics = any(getattr(part, "track_running_stats", False) for part in model.modules())
    mover = ActivationOffload()
    for module in found:
        repeat = getattr(module, _OWN_FUNCTION)
        if isinstance(repeat, functools.partial) and repeat.func is checkpoint:
            refuse(_unknown(chosen, _OF_CHECKPOINT))
        repeat = functools.partial(_offloaded, mover, repeat) if offload else repeat
        setattr(
            module,
            _OWN_FUNCTION,
            functools.partial(_with_own_buffers, repeat) if keeps_statistics else repeat,
        )


def _offloaded(mover: ActivationOffload, repeat: Any, *args: Any, **kwargs: Any) -> Any:
    """Recompute with the inputs of the block on the host."""
    with mover.saving():
        return repeat(*args, **kwargs)


def _with_own_buffers(repeat: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Recompute `forward`, which is a method of a block, perhaps with some of its arguments: the block is what it is
    bound to, or the first of these.
    """
    first = next(iter(getattr(forward, "args", ())), None)
    block = getattr(getattr(forward, "func", forward), "__self__", first)
    has_buffers = isinstance(block, nn.Module) and next(block.buffers(), None) is not None
    return repeat(_Repeated(block, forward) if has_buffers else forward, *args, **kwargs)


class _Repeated:
    """A forward of a block that runs again in the backward: with the buffers as they were before the first time, and
    without changing them once more.
    """

    def __init__(self, block: Any, forward: Callable[..., Any]) -> None:
        self._block, self._forward = block, forward
        self._before: dict[tuple[int, str], Tensor] | None = None  # of buffers that the first run changed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = [
            (part._buffers, name, buffer)
            for part in self._block.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        if self._before is None:
            # Copies of all are there for this forward alone: a block may have large masks, which do not change. Batch
            # norms change their statistics unseen, which they do not compute with.
            copies = [(buffer.clone(), buffer._version) for _, _, buffer in own]
            made = self._forward(*args, **kwargs)
            self._before = {
                (id(table), name): copy
                for (table, name, buffer), (copy, version) in zip(own, copies, strict=True)
                if table.get(name) is not buffer or buffer._version != version
            }
            return made
        # Other tensors and not other values: what autograd has saved must not change.
        for table, name, buffer in own:
            table[name] = self._before.get((id(table), name), buffer).clone()
        try:
            return self._forward(*args, **kwargs)
        finally:
            for table, name, buffer in own:
                table[name] = buffer


# Plain modules


def _wrap_blocks(
    model: nn.Module, given: Sequence[nn.Module], chosen: dict[str, Any], every: int, offload: bool
) -> None:
    _check_plain_options(chosen)
    blocks = list(given or repeated_blocks(model))
    if not blocks:
        fix = (
            f"{type(model).__name__} has no repeated blocks to recompute: no ModuleList or Sequential holds several "
            "modules of one class with layers inside; group its layers into blocks, or turn recomputation off"
        )
        raise ConfigError(Problem("activation_checkpointing", True, fix))
    repeat: Any = functools.partial(checkpoint, **chosen)
    if offload:
        repeat = functools.partial(_offloaded, ActivationOffload(), repeat)
    if any(next(block.buffers(), None) is not None for block in blocks):
        repeat = functools.partial(_with_own_buffers, repeat)
    for block in blocks[::every]:
        if not isinstance(block, _Recomputed):  # a second `train()` has a prepared model
            mix(_Recomputed, block)
        block._recompute = repeat


def _unknown(chosen: Mapping[str, Any], known: Sequence[str]) -> list[Problem]:
    takes = f"known options: {', '.join(_PLAIN_OPTIONS)}"
    return [Problem(f"{_FIELD}.{k}", v, takes) for k, v in chosen.items() if k not in known]


def _check_plain_options(chosen: Mapping[str, Any]) -> None:
    problems = _unknown(chosen, (*_PLAIN_OPTIONS, "context_fn"))
    if chosen["use_reentrant"]:
        fix = "re-entrant recomputation loses gradients of blocks called by keyword; leave it False"
        problems.append(Problem(f"{_FIELD}.use_reentrant", True, fix))
    refuse(problems)


class _Recomputed(nn.Module):
    """A block whose forward is recomputed in training, mixed into its class."""

    _recompute: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return self._recompute(functools.partial(super().forward, **kwargs), *args)
