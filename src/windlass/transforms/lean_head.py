"""The linear head of a model, which makes a loss or log-probabilities of hidden states in place of logits.

The model's own forward runs, through all its wrappers, so hooks of DDP and FSDP2 see the inputs and the result. Within
it the head's forward is replaced: it gets the hidden states, and returns what was asked for.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.attributes import attributes_of
from windlass.core.tensors import autocast_dtype, makes_fakes
from windlass.core.types import IGNORED
from windlass.dist.sharded import is_sharded
from windlass.metrics.tokens import comes_shifted
from windlass.transforms.context import has_divided_sequences
from windlass.transforms.evaluating import evaluating, vocabulary_of
from windlass.transforms.linear_cross_entropy import LossOptions, linear_cross_entropy
from windlass.transforms.linear_log_probabilities import TokenLogProbabilities, linear_log_probabilities
from windlass.transforms.tensor_split import TensorSplit, mine, split_of

_LABELS = ("labels", "shift_labels")
_CLASSIFIERS = ("classifier", "score")  # transformers' names
_LOSS_ROUNDING, _LOW_PRECISION_ROUNDING = 1e-5, 5e-3


class InexactLossError(Exception):
    """Why what is made without logits is not what a model computes."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """What a forward has made; scalars on the model's device. Only `loss` and `auxiliary` are differentiable.

    Attributes:
        loss, entropy, correct: sums over the targets; see `LinearLoss`.
        targets: their number (with class weights, the sum of their weights).
        auxiliary: the balancing loss of a mixture of experts, before its coefficient; None if the model returns none.
    """

    loss: Tensor
    entropy: Tensor
    correct: Tensor
    targets: Tensor
    auxiliary: Tensor | None

    def detached(self) -> LossSums:
        """The same without gradients."""
        auxiliary = None if self.auxiliary is None else self.auxiliary.detach()
        return replace(self, loss=self.loss.detach(), auxiliary=auxiliary)


class LeanHead:
    """A plain linear head, and what its model does around it.

    Attributes:
        scale, softcap: see `LossOptions`.
        shifts: label t is predicted at position t-1.
        difference: from the model's own loss on the sample that it was compared on, as a fraction of that.
    """

    def __init__(self, core: nn.Module, head: nn.Linear) -> None:
        self._core, self._head = weakref.ref(core), weakref.ref(head)
        self.scale, self.shifts, self.difference = 1.0, True, 0.0
        self.softcap: float | None = None

    @classmethod
    def measured(cls, model: nn.Module, core: nn.Module, sample: Mapping[str, Any] | None = None) -> LeanHead:
        """The head of a model, once the loss that it makes equals the model's own.

        Args:
            model: the model, or what wraps it without data parallelism.
            core: the module in it that has the head.
            sample: a small batch with labels that both losses are computed on; None: eight tokens.

        Raises:
            InexactLossError: only the model's own loss is exact.
        """
        head = head_of(core)
        plain = type(head).forward is nn.Linear.forward or split_of(head) is not None
        if not plain or "forward" in vars(head):
            kind = type(head)
            raise InexactLossError(
                f"its head is a {kind.__module__}.{kind.__qualname__}, not a plain linear layer"
            )
        found = cls(core, head)
        with evaluating(core):
            try:
                found._measure(model, _eight_tokens(core, head) if sample is None else sample)
            except InexactLossError:
                raise
            except Exception as error:
                raise InexactLossError(f"{type(error).__name__}: {error}") from error
        return found

    def is_of(self, core: nn.Module) -> bool:
        """Return True if this is the head of `core`, not of another model that shares it."""
        return self._core() is core

    def loss(self, model: nn.Module, inputs: Mapping[str, Any], options: LossOptions) -> LossSums:
        """A forward of `model` on a batch with labels, with the loss in place of the logits.

        Args:
            model: the model that was measured, or any wrapper around it.
            options: label smoothing, z-loss, class weights; `scale` and `softcap` are those of the model.

        Raises:
            InexactLossError: a wrapper changes what the head gets.
        """
        options = replace(options, scale=self.scale, softcap=self.softcap)
        made, auxiliary = self._forward(model, inputs, partial(linear_cross_entropy, options=options))
        loss, entropy, correct, weight = made
        return LossSums(loss.reshape(()), entropy, correct, weight, auxiliary)

    def log_probabilities(
        self, model: nn.Module, inputs: Mapping[str, Any]
    ) -> tuple[TokenLogProbabilities, Tensor | None]:
        """As `loss`, for the log-probability of each target: figures of the shape of the targets, and the auxiliary
        loss.
        """
        compute = partial(linear_log_probabilities, scale=self.scale, softcap=self.softcap)
        made, auxiliary = self._forward(model, inputs, compute)
        return TokenLogProbabilities(*made), auxiliary

    def _targets(self, inputs: Mapping[str, Any]) -> Tensor:
        """The target of each position."""
        if comes_shifted(inputs):
            return inputs["shift_labels"]  # type: ignore[no-any-return]
        return shifted(inputs["labels"]) if self.shifts else inputs["labels"]

    def _forward(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        compute: Callable[..., tuple[Tensor, ...]],
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """A forward of `model` in which `compute` replaces the head. It is given hidden states, weight and bias of the
        head, or of this rank's part of it, and targets. Returns what it made, a sum or a value for each target, of
        which the first is differentiated; and the auxiliary loss.
        """
        targets = self._targets(inputs)
        core, head = self._alive()
        inputs, divided = unlabelled(core, inputs), has_divided_sequences(core)
        if divided:
            inputs["shift_labels"] = targets
        figures: list[tuple[Tensor, ...]] = []
        made: list[Tensor] = []

        def made_of(hidden: Tensor) -> Tensor:
            result, *others = _computed(compute, hidden, targets, *_parts_of(core, head))
            figures.append(tuple(others))
            return result

        def instead(hidden: Tensor) -> Tensor:
            if made:
                raise InexactLossError("its forward uses its head more than once")
            # A classifier of sequences chooses one position of each row after its head: the head chooses nothing.
            is_of_rows = targets.ndim == 1 and hidden.ndim == 3 and len(hidden) == len(targets)
            return hidden if is_of_rows else made_of(hidden)

        def keep(_: nn.Module, __: Any, output: Tensor) -> None:
            # The output and not what `compute` returned: hooks of FSDP2, which ran before, may have replaced it.
            made.append(output)

        forward = core.forward

        def forward_of_core(*args: Any, **kwargs: Any) -> dict[str, Any]:
            nonlocal targets
            if divided:  # those of this rank's part
                targets = kwargs.pop("shift_labels")
                kwargs.pop("num_items_in_batch")
            outputs = forward(*args, **kwargs)
            if len(made) != 1:
                raise InexactLossError("its forward does not use its head")
            if not figures:
                made[0] = made_of(output_of(outputs, "logits"))
            return {"made": made[0], "figures": figures[0], "auxiliary": output_of(outputs, "aux_loss")}

        with (
            head.register_forward_hook(keep),
            attributes_of(head, forward=instead),
            attributes_of(core, forward=forward_of_core),
        ):
            found = model(**inputs, **without_cache(core))
        return (found["made"], *found["figures"]), found["auxiliary"]

    def _alive(self) -> tuple[nn.Module, nn.Linear]:
        core, head = self._core(), self._head()
        assert core is not None
        assert head is not None
        return core, head

    # --- measuring --------------------------------------------------------------------------------------------------

    def _measure(self, model: nn.Module, sample: Mapping[str, Any]) -> None:
        if makes_fakes():
            self._look(model, sample)
            return
        core, head = self._alive()
        own = float(output_of(model(**sample, **without_cache(core)), "loss"))
        self.scale, self.softcap = self._around(model, sample)
        losses: dict[bool, float] = {}
        for self.shifts in (True, False) if sample["labels"].ndim > 1 else (False,):
            sums = self.loss(model, sample, LossOptions())
            auxiliary = 0.0 if sums.auxiliary is None else coefficient_of(core) * float(sums.auxiliary)
            losses[self.shifts] = float(sums.loss / sums.targets.clamp(min=1)) + auxiliary
        self.shifts = min(losses, key=lambda shifts: abs(losses[shifts] - own))
        ours = losses[self.shifts]
        precision = _LOSS_ROUNDING if _is_precise(head) else _LOW_PRECISION_ROUNDING
        if not math.isclose(ours, own, rel_tol=precision, abs_tol=precision):
            tokens = int((sample["labels"] != IGNORED).sum())
            raise InexactLossError(f"on {tokens} tokens it gives {ours:.6g}, and the model itself {own:.6g}")
        self.difference = abs(ours - own) / max(abs(own), precision)

    def _look(self, model: nn.Module, sample: Mapping[str, Any]) -> None:
        """As `_measure` where a forecast computes, on tensors without values: see what their shapes show."""
        core, head = self._alive()
        outputs = model(**sample, **without_cache(core))
        if output_of(outputs, "loss") is None:
            raise InexactLossError("it returns no loss")
        logits = output_of(outputs, "logits")
        if logits is None or logits.shape[-1] != head.out_features:
            raise InexactLossError("its logits are not those of its head")
        self.shifts = sample["labels"].ndim > 1
        self.loss(model, sample, LossOptions())

    def _around(self, model: nn.Module, sample: Mapping[str, Any]) -> tuple[float, float | None]:
        """What the model does to its logits, from what becomes of known ones."""
        core, head = self._alive()
        # Not in half precision, in which a factor cannot be read from a product.
        precise = torch.promote_types(head.weight.dtype, torch.float32)
        known = torch.linspace(-100.0, 100.0, head.out_features, device=head.weight.device, dtype=precise)
        # The first shows the factor, and the second, which is above any of them, the cap.
        known[:2] = torch.tensor([1.0, 1e6])

        def logits(hidden: Tensor) -> Tensor:
            return known.expand(*hidden.shape[:-1], -1)

        with attributes_of(head, forward=logits):
            outputs = model(**unlabelled(core, sample), **without_cache(core))
        became = output_of(outputs, "logits")
        if became is None or became.shape[-1] != len(known):
            raise InexactLossError("its logits are not those of its head")
        # On the host, since MPS has no float64.
        became, known = became.flatten(0, -2)[-1].cpu().double(), known.to(became.dtype).cpu().double()
        offset = _offset_of(core)
        if offset is not None:
            became = became - offset.cpu().double()
        scale: float = (became[0] / known[0]).item()
        softcap: float | None = None
        if abs(became[1].item()) < 0.5 * abs(scale * known[1].item()):
            softcap = became[1].item()
            scale = softcap * math.atanh(min(became[0].item() / softcap, 1 - 1e-9))
            # Read from the slope of a rounded tanh, a factor of 1 is not exactly that.
            scale = 1.0 if abs(scale - 1.0) < 1e-2 else scale
        expected = known * scale if softcap is None else softcap * torch.tanh(known * scale / softcap)
        precision = 1e-5 if _is_precise(head) else 1e-2
        if not torch.allclose(became, expected, rtol=precision, atol=precision):
            raise InexactLossError("it does more to its logits than a factor and soft-capping")
        return scale, softcap


# --- the model --------------------------------------------------------------------------------------------------------


def head_of(core: Any) -> Any:
    """What makes the logits of a language model, or of a classifier of tokens or sequences; None if there is none. Of a
    head that peft trains as a whole (`modules_to_save`) the copy that is in use.
    """
    head = core.get_output_embeddings()
    if head is None:
        head = next((getattr(core, name) for name in _CLASSIFIERS if hasattr(core, name)), None)
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        disabled, active = head.disable_adapters, head.active_adapters
        head = head.original_module if disabled or len(active) != 1 else copies[active[0]]
    return head


def coefficient_of(core: nn.Module) -> float:
    """The factor of the balancing loss that a model adds to its loss."""
    return float(getattr(getattr(core, "config", None), "router_aux_loss_coef", 0.0))


def output_of(outputs: Any, name: str) -> Any:
    """A field of a model's outputs; None if there is none."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def without_cache(core: nn.Module) -> dict[str, bool]:
    """`use_cache=False` if the model has that argument: keys and values would be kept, and packed rows not be seen."""
    parameters = inspect.signature(type(core).forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    has_cache = hasattr(getattr(core, "config", None), "use_cache")
    return {"use_cache": False} if "use_cache" in parameters or (takes_any and has_cache) else {}


def unlabelled(core: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without its labels, with the decoder's inputs that an encoder-decoder model would make of them."""
    kept = {name: value for name, value in inputs.items() if name not in _LABELS}
    is_pair = getattr(getattr(core, "config", None), "is_encoder_decoder", False)
    if is_pair and kept.get("decoder_input_ids") is None and kept.get("decoder_inputs_embeds") is None:
        make: Any = getattr(core, "prepare_decoder_input_ids_from_labels", None)
        if make is None:
            raise InexactLossError("it has no prepare_decoder_input_ids_from_labels")
        kept["decoder_input_ids"] = make(labels=inputs["labels"])
    return kept


def shifted(labels: Tensor) -> Tensor:
    """The target of each position: the label after it."""
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def _eight_tokens(core: nn.Module, head: nn.Linear) -> dict[str, Tensor]:
    vocabulary = min(head.out_features, vocabulary_of(core) or head.out_features)
    ids = torch.arange(8, device=head.weight.device)[None] % vocabulary
    return {"input_ids": ids, "labels": ids}


def _offset_of(core: nn.Module) -> Tensor | None:
    """What BART and its relatives add to their logits: a buffer of shape (1, classes)."""
    found = dict(core.named_buffers(recurse=False)).get("final_logits_bias")
    return None if found is None else found[0]


def _parts_of(core: nn.Module, head: nn.Linear) -> tuple[Tensor, Tensor | None, TensorSplit]:
    """Weight and bias of the head, or of the part that this rank of a tensor gang has."""
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    split = split_of(head) or TensorSplit(head.out_features)
    if split.ranks > 1:
        weight, bias = mine(weight), None if bias is None else mine(bias)
    if is_sharded(weight) or len(weight) != len(split.mine):
        raise InexactLossError("its head is divided among processes in its forward")
    offset = _offset_of(core)
    if offset is not None:
        offset = offset[split.mine.start : split.mine.stop]
        bias = offset if bias is None else bias + offset
    return weight, bias, split


def _is_precise(head: nn.Linear) -> bool:
    return (autocast_dtype(head.weight) or head.weight.dtype) in (torch.float32, torch.float64)


# --- positions --------------------------------------------------------------------------------------------------------


def _computed(
    compute: Callable[..., tuple[Tensor, ...]],
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    split: TensorSplit,
) -> tuple[Tensor, ...]:
    """What `compute` makes of hidden states and their targets: of values in the shape of these; of sums as they are,
    but for the first, which has as many axes as hidden states.
    """
    if hidden.shape[:-1] != targets.shape:
        raise InexactLossError(f"its head gets {tuple(hidden.shape)} for targets of {tuple(targets.shape)}")
    places = _places(targets.flatten())
    states, wanted = hidden.flatten(0, -2)[places], targets.flatten()[places]
    result, *others = compute(states, weight, bias, wanted, split=split)
    if not result.dim():
        return result.reshape((1,) * hidden.ndim), *others
    return tuple(_spread(values, places, targets) for values in (result, *others))


def _places(targets: Tensor) -> Tensor | slice:
    """Which of the targets (positions,) are computed: on a CPU those that are not -100."""
    if not targets.is_cpu:  # their number is not known on the host
        return slice(None)
    places = (targets != IGNORED).nonzero()[:, 0]
    return slice(None) if len(places) == len(targets) else places


def _spread(values: Tensor, places: Tensor | slice, targets: Tensor) -> Tensor:
    """Values at some places in a tensor of the shape of `targets`, 0 elsewhere."""
    if isinstance(places, slice):
        return values.view(targets.shape)
    return values.new_zeros(targets.numel()).index_put((places,), values).view(targets.shape)
