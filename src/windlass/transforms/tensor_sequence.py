"""Sequence-parallel norms (Korthikanti et al., arXiv:2205.05198): between the layers that a tensor gang divides, each
rank has some positions of the hidden states.

Sums over ranks become reduce-scatters, after which each rank computes residuals, norms and dropout of its positions.
The next divided layers begin with an all-gather: as many bytes, and less memory. A stack of blocks gets and returns
whole hidden states, so that nothing outside of it changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.module_state import without_adapters
from windlass.core.rng import ForwardRandomness
from windlass.core.tensors import makes_fakes
from windlass.core.trees import tensors_in
from windlass.dist.gang import Gang
from windlass.transforms.evaluating import evaluating, rounding, short_row
from windlass.transforms.mixing import mix
from windlass.transforms.tensor_plan import ADAPTED, HEADS, SUMMED
from windlass.transforms.tensor_split import Joined, TensorSplit, part_of, scaled, whole_of

FIELD = "TorchTensorParallelConfig.enable_sequence_parallel"


class SequenceParts:
    """Which positions of the hidden states this rank has while a forward runs.

    Attributes:
        entered: how they are divided between the first block and the last; None outside of these.
        now: the same; None also in layers that compute all positions.
        joined: all positions, which the layer under way began with; None outside of such layers.
        off: forwards compute all positions.
    """

    def __init__(self, tensor_ranks: Gang, device: torch.device) -> None:
        self._ranks, self._device = tensor_ranks, device
        self.off, self._asked_whole = False, False
        self.entered: TensorSplit | None = None
        self.now: TensorSplit | None = None
        self.joined: Joined | None = None
        self._randomness = ForwardRandomness(device, tensor_ranks.rank)

    def begin(self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before a forward of a stack. One that returns hidden states computes all positions."""
        # An error may have ended the last forward between two blocks.
        self.entered = self.now = None
        config = getattr(stack, "config", None)
        asked = kwargs.get("output_hidden_states")
        self._asked_whole = bool(getattr(config, "output_hidden_states", False) if asked is None else asked)

    def enter(self, hidden: Tensor) -> Tensor:
        """This rank's positions of what a block gets, which are those already unless it is the first."""
        if self.entered is not None:
            return hidden
        if hidden.dim() != 3:
            raise ModelError(
                f"hidden states of shape {tuple(hidden.shape)} have no positions. Set {FIELD}=False"
            )
        ranks = self._ranks
        self.entered = TensorSplit(hidden.shape[1], ranks.size, ranks.rank, ranks.device_group)
        return part_of(hidden, self.entered)

    def leave(self, part: Tensor) -> Tensor:
        """All positions of what the last block returns."""
        split, self.entered = self.entered, None
        assert split is not None
        return whole_of(part, split)

    def join(self, part: Tensor) -> Tensor:
        """All positions, with which a layer computes that divides its work."""
        assert self.now is not None, "positions are divided"
        self.joined = Joined(part, self.now)
        return self.joined.whole

    @property
    def is_on(self) -> bool:
        """Return True if the forward under way divides positions."""
        return not self.off and not self._asked_whole

    @contextlib.contextmanager
    def dividing(self, split: TensorSplit, draws: bool) -> Iterator[None]:
        """Within the body, that of a block, each rank has its positions, and draws random numbers of its own."""
        before, self.now = self.now, split
        draws = draws and not makes_fakes()
        if draws:
            self._randomness.begin()
        try:
            yield
        finally:
            self.now = before
            if draws:
                self._randomness.end()

    @contextlib.contextmanager
    def whole(self, draws: bool) -> Iterator[None]:
        """Within the body, in that of `dividing`, ranks compute the same, of all positions."""
        before, self.now = self.now, None
        common = draws and not makes_fakes()
        try:
            with self._randomness.shared() if common else contextlib.nullcontext():
                yield
        finally:
            self.now = before

    def check(self, model: nn.Module, unit_dtype: torch.dtype | None) -> None:
        """Compute a short row with all positions on each rank, and with some. Collective. `unit_dtype`: see `Strategy`.

        Raises:
            ConfigError: on all ranks: the results differ.
        """
        # A length that the ranks do not divide, so that the last part has padding.
        ids = short_row(model, 2 * self._ranks.size + 1, self._device)
        # An error of the model is compared with the other ranks like a result: raised here alone, they would wait.
        made: list[Tensor] = []
        wrong = ""
        with evaluating(model):
            try:
                for self.off in (True, False):
                    made.append(next(iter(tensors_in(model(input_ids=ids)))))
            except (RuntimeError, ModelError, TypeError, ValueError, KeyError, IndexError) as error:
                wrong = f"{type(error).__name__}: {error}"
        self.off = False
        if not wrong:
            difference, scale = float((made[1] - made[0]).abs().max()), float(made[0].abs().max())
            if not difference <= rounding(model, made, unit_dtype) * scale:
                wrong = f"its logits differ by {difference:.2g}, of up to {scale:.2g}"
        for reason in filter(None, self._ranks.gather_objects(wrong)):
            name = type(without_adapters(model)).__name__
            fix = f"the blocks of {name} cannot be computed for some positions ({reason}): leave it out"
            raise ConfigError(Problem(FIELD, True, fix))


class _InParts(nn.Module):
    sequence_parts: SequenceParts


class PartsBlock(_InParts):
    """A block of which each rank computes its positions, mixed into the class of the block."""

    ends_parts: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The first block gets all positions, and the last returns them."""
        parts = self.sequence_parts
        if not parts.is_on:
            return super().__call__(*args, **kwargs)
        args, kwargs = _with_hidden(parts.enter, args, kwargs)
        # An argument, so that it is there when the block is computed again in the backward.
        found = super().__call__(*args, sequence_split=parts.entered, **kwargs)
        return _with_first(parts.leave, found) if self.ends_parts else found

    def forward(self, *args: Any, sequence_split: TensorSplit | None = None, **kwargs: Any) -> Any:
        """What the block returns, of this rank's positions."""
        if sequence_split is None:
            return super().forward(*args, **kwargs)
        with self.sequence_parts.dividing(sequence_split, self.training):
            return super().forward(*args, **kwargs)


class DividedWithin(_InParts):
    """A layer that begins with column-wise layers and ends with a row-wise one: it gets all positions, and returns this
    rank's. Each rank has its share of the gradients of what it gets, which are summed where they are scattered.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns, of this rank's positions."""
        parts = self.sequence_parts
        if parts.now is None:
            return super().forward(*args, **kwargs)
        args, kwargs = _with_hidden(parts.join, args, kwargs)
        try:
            return super().forward(*args, **kwargs)
        finally:
            parts.joined = None


class WholeWithin(_InParts):
    """A layer that all ranks compute for all positions, with the same gradients, as experts and their router."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns, of this rank's positions."""
        parts = self.sequence_parts
        split = parts.now
        if split is None:
            return super().forward(*args, **kwargs)
        args, kwargs = _with_hidden(lambda part: whole_of(part, split), args, kwargs)
        with parts.whole(self.training):
            found = super().forward(*args, **kwargs)
        return _with_first(lambda whole: part_of(whole, split), found)


class ShareOfGradient(nn.Module):
    """A layer with whole parameters that computes with this rank's heads or positions, mixed into its class.

    Its gradients are multiplied by the number of ranks, so that their average over the gang is their sum.
    """

    sharing_ranks: int
    sequence_parts: SequenceParts | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns."""
        if self.sequence_parts is not None and self.sequence_parts.now is None:
            return super().forward(*args, **kwargs)
        # `nn.Module` refuses to assign a tensor to the name of a parameter.
        own = self._parameters
        vars(self)["_parameters"] = {
            name: None if p is None else scaled(p, self.sharing_ranks) for name, p in own.items()
        }
        try:
            return super().forward(*args, **kwargs)
        finally:
            vars(self)["_parameters"] = own


# --- the division -----------------------------------------------------------------------------------------------------


def divide_positions(
    module: nn.Module, chosen: Mapping[str, tuple[nn.Module, str]], tensor_ranks: Gang, device: torch.device
) -> SequenceParts:
    """Have the blocks of `module` compute this rank's positions, once the `chosen` layers are divided.

    Args:
        device: of the hidden states.

    Raises:
        ConfigError: the model has no single stack of blocks with such layers.
    """
    model = without_adapters(module)
    styles = {id(layer): style for layer, style in chosen.values() if style != HEADS}
    stack, blocks = _stack_of(model, styles)
    parts = SequenceParts(tensor_ranks, device)
    stack.register_forward_pre_hook(parts.begin, with_kwargs=True)
    for number, block in enumerate(blocks):
        found: Any = block
        for child in block.children():
            _divide_child(child, parts, styles, tensor_ranks.size)
        if any(True for _ in block.parameters(recurse=False)):
            share_gradient(block, tensor_ranks.size, parts)
        found.sequence_parts = parts
        mix(PartsBlock, block)
        # A pipeline sends all positions from one stage to the next.
        found.ends_parts = number == len(blocks) - 1 or hasattr(block, "ends_stage")
    return parts


def divides_positions(module: nn.Module) -> bool:
    """Return True for a model that `divide_positions` has changed."""
    return any(isinstance(part, PartsBlock) for part in module.modules())


def _stack_of(model: nn.Module, styles: Mapping[int, str]) -> tuple[nn.Module, list[nn.Module]]:
    """The module that calls the blocks of a model, and the blocks."""
    found: list[tuple[nn.Module, list[nn.Module]]] = []
    inside: set[int] = set()
    for module in model.modules():
        for child in module.children():
            # Blocks may have lists inside, such as of experts, which are no stacks.
            if id(child) in inside or not isinstance(child, nn.ModuleList):
                continue
            if len(child) and all(any(id(part) in styles for part in block.modules()) for block in child):
                found.append((module, list(child)))
                inside.update(map(id, child.modules()))
    is_pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if len(found) != 1 or is_pair:
        fix = (
            f"needs one list of blocks with divided layers, and {type(model).__name__} has {len(found)}"
            f"{', an encoder among them' if is_pair else ''}: leave it out"
        )
        raise ConfigError(Problem(FIELD, True, fix))
    return found[0]


def _divide_child(child: Any, parts: SequenceParts, styles: Mapping[int, str], ranks: int) -> None:
    """Prepare a module that a block calls."""
    own = {name: part for name, part in child.named_modules() if id(part) in styles}
    if own and "" not in own and not _is_divided_within({n: styles[id(p)] for n, p in own.items()}):
        child.sequence_parts = parts
        mix(WholeWithin, child)
        return
    for part in child.modules():
        style = styles.get(id(part), SUMMED)
        if style != SUMMED:
            part.sequence_parts, part.begins_parts = parts, part is child
        elif any(True for _ in part.parameters(recurse=False)):
            share_gradient(part, ranks, None if id(part) in styles else parts)
    if own and "" not in own:
        child.sequence_parts = parts
        mix(DividedWithin, child)


def _is_divided_within(styles: Mapping[str, str]) -> bool:
    """Return True for the layers of a module, by name, that divide its work from the beginning to the end."""
    plain = {name.removesuffix(ADAPTED): style for name, style in styles.items() if ".lora_" not in name}
    work = [style for name, style in plain.items() if style != SUMMED and "." not in name]
    # After a row-wise layer results are sums over ranks, no longer parts: only one may be there, at the end.
    return (
        sorted(set(work)) == ["colwise", "rowwise"]
        and work.count("rowwise") == 1
        and all(style == SUMMED or "." not in name for name, style in plain.items())
    )


def share_gradient(layer: Any, ranks: int, parts: SequenceParts | None = None) -> None:
    """Have a layer give its share of the gradients of its parameters; see `ShareOfGradient`."""
    layer.sharing_ranks, layer.sequence_parts = ranks, parts
    mix(ShareOfGradient, layer)


def _with_hidden(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a layer with other hidden states, which are the first."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _with_first(change: Callable[[Tensor], Tensor], found: Any) -> Any:
    """What a layer returns with another tensor, or another first one."""
    return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)
