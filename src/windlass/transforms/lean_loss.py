"""The loss of a language model without its logits: the head and the cross entropy are one function.

The model's own forward runs, through all its wrappers, so hooks of DDP and FSDP2 see the inputs and the loss. Within it
the head's forward is replaced: instead of logits it makes the loss of the hidden states that have a target.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.logs import get_logger
from windlass.transforms.context import has_divided_sequences
from windlass.transforms.evaluating import evaluating
from windlass.transforms.linear_cross_entropy import IGNORED, LossOptions, linear_cross_entropy
from windlass.transforms.linear_log_probabilities import (
    TokenLogProbabilities,
    linear_log_probabilities,
    log_probabilities_of,
)
from windlass.transforms.neftune import vocabulary_of

logger = get_logger(__name__)
Found = TypeVar("Found")
PLAIN = LossOptions()


@dataclass(frozen=True, slots=True)
class LossFigures:
    """What the pass that made a loss has counted; scalars on the model's device, without gradients.

    Attributes:
        loss: the sum over the targets, without an auxiliary loss.
        targets: their number (with class weights, the sum of their weights).
        entropy: of the predicted distributions, summed, in nats.
        correct: targets with the largest logit.
        auxiliary: the balancing loss of a mixture of experts, before its coefficient; None if the model returns none.
    """

    loss: Tensor
    targets: Tensor
    entropy: Tensor
    correct: Tensor
    auxiliary: Tensor | None = None


def lean_causal_lm_loss(
    model: nn.Module,
    inputs: Mapping[str, Any],
    num_items_in_batch: Tensor | float | None = None,
    *,
    options: LossOptions = PLAIN,
    router_aux_loss_coef: float | None = None,
) -> tuple[Tensor, LossFigures]:
    """The loss of a causal or masked language model, as its own forward with labels computes it.

    What the model does to its logits (a factor, soft-capping) and whether it shifts labels are measured once, on eight
    tokens, and the result is compared with the model's own loss. If they differ, or if the head is not a linear layer,
    the model's own loss is used, with one line in the log.

    Args:
        model: the model or a wrapper around it. It has `get_output_embeddings`, and with `labels` it returns a `loss`.
        inputs: the batch, with `labels` (or `shift_labels`, which are not shifted). -100 is not a target.
        num_items_in_batch: divides the sum of losses; None: the number of targets in `inputs`.
        options: label smoothing, z-loss, class weights. `scale` and `softcap` are those of the model.
        router_aux_loss_coef: factor of the auxiliary loss; None: that of the model's configuration.

    Returns:
        The loss, a scalar with a graph, and what was counted.

    Raises:
        ModelError: `inputs` have no labels; or options are set that the model's own loss does not have.
    """
    _check_labels(inputs)
    core = _core(model)
    head = _Head.of(model, core)
    found = None if head is None else head.found(model, inputs, options)
    if found is None:
        return _own_loss(model, core, inputs, num_items_in_batch, options, router_aux_loss_coef)
    divisor = found["targets"].clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss, auxiliary = found["loss"], found["auxiliary"]
    figures = LossFigures(
        loss.detach(),
        found["targets"],
        found["entropy"],
        found["correct"],
        None if auxiliary is None else auxiliary.detach(),
    )
    loss = loss / divisor
    if auxiliary is not None:
        coefficient = _coefficient(core) if router_aux_loss_coef is None else router_aux_loss_coef
        loss = loss + coefficient * auxiliary.to(loss)
    return loss, figures


def lean_log_probabilities(
    model: nn.Module, inputs: Mapping[str, Any]
) -> tuple[TokenLogProbabilities, Tensor | None]:
    """The log-probability of each label under a causal language model, without whole logits if its head allows that.

    The model's forward runs through all its wrappers (adapters, DDP, FSDP2), so it may be differentiated as usual. A
    head that is not a plain linear layer, or a model that does more to its logits than a factor and soft-capping, makes
    whole logits, with one line in the log.

    Args:
        model: the model or a wrapper around it. It has `get_output_embeddings`.
        inputs: the batch, with `labels` of shape (batch, length), or `shift_labels`, which are not shifted. -100 is not
            a target.

    Returns:
        Figures of shape (batch, length), and the auxiliary loss of a mixture of experts (None if the model returns
        none). Those of `labels[:, t]` are at t-1, the position that predicts it; the last position has none.

    Raises:
        ModelError: `inputs` have no labels.
    """
    _check_labels(inputs)
    core = _core(model)
    head = _Head.of(model, core)
    found = None if head is None else head.found_log_probabilities(model, inputs)
    if found is not None:
        return found
    outputs = model(**_unlabelled(inputs), **_without_cache(core))
    targets = inputs["shift_labels"] if "shift_labels" in inputs else _shifted(inputs["labels"])
    logits = _get(outputs, "logits")[
        ..., -targets.shape[-1] :, :
    ]  # a wrapper may have put positions in front
    return log_probabilities_of(logits, targets), _get(outputs, "aux_loss")


def _check_labels(inputs: Mapping[str, Any]) -> None:
    if inputs.get("shift_labels", inputs.get("labels")) is None:
        raise ModelError(f"the batch has the keys {sorted(inputs)}, and no labels to compute a loss from")


def _core(model: nn.Module) -> nn.Module:
    """The outermost module whose class has a head."""
    for module in model.modules():
        if callable(getattr(type(module), "get_output_embeddings", None)):
            return module
    raise ModelError(
        f"{type(model).__name__} has no get_output_embeddings, so its head is not known. Give its class that "
        "method, or switch the memory-lean loss off."
    )


def _is_compiled(model: nn.Module, core: nn.Module) -> bool:
    """Return True if a graph of the whole forward was or will be made: it would be made again for every loss."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return True
        if module is core:
            break
    return False


def _coefficient(core: nn.Module) -> float:
    return float(getattr(getattr(core, "config", None), "router_aux_loss_coef", 0.0))


class _Head:
    """The linear head of a model, and what the model does around it.

    Attributes:
        scale, softcap: see `LossOptions`.
        shifts: label t is predicted at position t-1.
    """

    _known: weakref.WeakKeyDictionary[nn.Module, _Head | None] = weakref.WeakKeyDictionary()

    def __init__(self, core: nn.Module, head: nn.Linear) -> None:
        self._core, self._head = weakref.ref(core), weakref.ref(head)
        self.scale, self.shifts = 1.0, True
        self.softcap: float | None = None
        self._measure(core, head)

    @classmethod
    def of(cls, model: nn.Module, core: nn.Module) -> _Head | None:
        """The head of a model, measured once for each head; None if only the model's own loss is exact."""
        head = core.get_output_embeddings()  # type: ignore[operator]
        known = cls._known.get(core)
        if core not in cls._known or (known is not None and known._head() is not head):
            cls._known[core] = cls._measured(model, core, head)
        return cls._known[core]

    @classmethod
    def _measured(cls, model: nn.Module, core: nn.Module, head: Any) -> _Head | None:
        try:
            if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
                raise _InexactError(f"its head is a {type(head).__name__}, not a plain linear layer")
            if _is_compiled(model, core):
                raise _InexactError("it is compiled as a whole; compile its layers")
            return cls(core, head)
        except _InexactError as reason:
            _log(core, reason)
            return None

    def found(
        self, model: nn.Module, inputs: Mapping[str, Any], options: LossOptions
    ) -> dict[str, Any] | None:
        """What `run` returns for a batch with labels; None if a wrapper changes what the head gets."""
        options = replace(options, scale=self.scale, softcap=self.softcap)
        return self._tried(lambda: self.run(model, _unlabelled(inputs), self._targets(inputs), options))

    def found_log_probabilities(
        self, model: nn.Module, inputs: Mapping[str, Any]
    ) -> tuple[TokenLogProbabilities, Tensor | None] | None:
        """What `log_probabilities` returns for a batch with labels; None if a wrapper changes what the head gets."""
        return self._tried(lambda: self.log_probabilities(model, _unlabelled(inputs), self._targets(inputs)))

    def _targets(self, inputs: Mapping[str, Any]) -> Tensor:
        """The target of each position."""
        if "shift_labels" in inputs:
            return inputs["shift_labels"]  # type: ignore[no-any-return]
        return _shifted(inputs["labels"]) if self.shifts else inputs["labels"]

    def _tried(self, run: Callable[[], Found]) -> Found | None:
        try:
            return run()
        except _InexactError as reason:
            core, _ = self._alive()
            self._known[core] = None
            _log(core, reason)
            return None

    def run(
        self, model: nn.Module, inputs: Mapping[str, Any], targets: Tensor, options: LossOptions
    ) -> dict[str, Any]:
        """A forward of `model`, which wraps the one that was measured, with the loss in place of the logits. Returns
        scalars: `loss`, `entropy`, `correct`, `targets`; `auxiliary` may be None.
        """

        def loss_of(hidden: Tensor, head: nn.Linear, targets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            states, wanted = _with_targets(hidden, targets)
            loss, *others = linear_cross_entropy(states, head.weight, head.bias, wanted, options)
            return loss.reshape((1,) * hidden.ndim), tuple(others)

        loss, (entropy, correct, weight), auxiliary = self._forward(model, inputs, targets, loss_of)
        return {
            "loss": loss.reshape(()),
            "entropy": entropy,
            "correct": correct,
            "targets": weight,
            "auxiliary": auxiliary,
        }

    def log_probabilities(
        self, model: nn.Module, inputs: Mapping[str, Any], targets: Tensor
    ) -> tuple[TokenLogProbabilities, Tensor | None]:
        """As `run`, for the log-probability of each target. Returns figures of the shape of `targets`."""

        def chosen(hidden: Tensor, head: nn.Linear, targets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            places = _places(targets.flatten())
            found = linear_log_probabilities(
                hidden.flatten(0, -2)[places],
                head.weight,
                head.bias,
                targets.flatten()[places],
                scale=self.scale,
                softcap=self.softcap,
            )
            first, *others = (
                values.new_zeros(targets.numel()).index_put((places,), values).view(targets.shape)
                if isinstance(places, Tensor)
                else values.view(targets.shape)
                for values in found
            )
            return first, tuple(others)

        first, others, auxiliary = self._forward(model, inputs, targets, chosen)
        return TokenLogProbabilities(first, *others), auxiliary

    def _forward(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        targets: Tensor,
        make: Callable[[Tensor, nn.Linear, Tensor], tuple[Tensor, tuple[Tensor, ...]]],
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """A forward of `model` in which `make` replaces the head. It is given the hidden states, the head and the
        targets, and returns what is differentiated, and figures. Returns both, and the auxiliary loss.
        """
        core, head = self._alive()
        divided = has_divided_sequences(core)
        if divided:
            inputs = {**inputs, "shift_labels": targets}
        figures: list[tuple[Tensor, ...]] = []
        made: list[Tensor] = []

        def instead(hidden: Tensor) -> Tensor:
            if hidden.shape[:-1] != targets.shape or made:
                raise _InexactError(
                    f"its head gets {tuple(hidden.shape)} for targets of {tuple(targets.shape)}"
                )
            result, others = make(hidden, head, targets)
            figures.append(others)
            return result

        def keep(_: nn.Module, __: Any, output: Tensor) -> None:
            # The output and not what `make` returned: hooks of FSDP2, which ran before, may have replaced it.
            made.append(output)

        forward = core.forward

        def forward_of_core(*args: Any, **kwargs: Any) -> dict[str, Any]:
            nonlocal targets
            if divided:  # those of this rank's part
                targets = kwargs.pop("shift_labels")
                kwargs.pop("num_items_in_batch")
            outputs = forward(*args, **kwargs)
            if len(made) != 1:
                raise _InexactError("its forward does not use its head")
            return {"made": made[0], "figures": figures[0], "auxiliary": _get(outputs, "aux_loss")}

        hook = head.register_forward_hook(keep)
        try:
            with _forward(head, instead), _forward(core, forward_of_core):
                found = model(**inputs, **_without_cache(core))
        finally:
            hook.remove()
        return found["made"], found["figures"], found["auxiliary"]

    def _alive(self) -> tuple[nn.Module, nn.Linear]:
        core, head = self._core(), self._head()
        assert core is not None
        assert head is not None
        return core, head

    def _measure(self, core: nn.Module, head: nn.Linear) -> None:
        vocabulary = min(head.out_features, vocabulary_of(core) or head.out_features)
        ids = torch.arange(8, device=head.weight.device)[None] % vocabulary
        with evaluating(core):
            try:
                own = float(core(input_ids=ids, labels=ids, **_without_cache(core))["loss"])
                self.scale, self.softcap = self._around(core, head, ids)
                options = LossOptions(scale=self.scale, softcap=self.softcap)
                inputs = {"input_ids": ids}
                losses = {
                    shifts: _mean(self.run(core, inputs, _shifted(ids) if shifts else ids, options), core)
                    for shifts in (True, False)
                }
            except _InexactError:
                raise
            except Exception as error:
                raise _InexactError(f"{type(error).__name__}: {error}") from error
        self.shifts = min(losses, key=lambda shifts: abs(losses[shifts] - own))
        precision = 1e-5 if head.weight.dtype in (torch.float32, torch.float64) else 5e-3
        if not math.isclose(losses[self.shifts], own, rel_tol=precision, abs_tol=precision):
            raise _InexactError(
                f"on eight tokens it gives {losses[self.shifts]:.6g}, and the model itself {own:.6g}"
            )

    def _around(self, core: nn.Module, head: nn.Linear, ids: Tensor) -> tuple[float, float | None]:
        """What the model does to its logits, from what becomes of known ones."""
        # Not in half precision, in which a factor cannot be read from a product.
        precise = torch.promote_types(head.weight.dtype, torch.float32)
        known = torch.linspace(-100.0, 100.0, head.out_features, device=ids.device, dtype=precise)
        known[:2] = torch.tensor([1.0, 1e6])

        def logits(hidden: Tensor) -> Tensor:
            return known.expand(*hidden.shape[:-1], -1)

        with _forward(head, logits):
            outputs = core(input_ids=ids, **_without_cache(core))
        became = _get(outputs, "logits")
        if became is None or became.shape[-1] != len(known):
            raise _InexactError("its logits are not those of its head")
        became, known = became.flatten(0, -2)[-1].double(), known.to(became.dtype).double()
        scale: float = (became[0] / known[0]).item()
        softcap: float | None = None
        if abs(became[1].item()) < 0.5 * abs(scale * known[1].item()):
            softcap = became[1].item()
            scale = softcap * math.atanh(min(became[0].item() / softcap, 1 - 1e-9))
            scale = 1.0 if abs(scale - 1.0) < 1e-2 else scale
        expected = known * scale if softcap is None else softcap * torch.tanh(known * scale / softcap)
        precision = 1e-5 if head.weight.dtype in (torch.float32, torch.float64) else 1e-2
        if not torch.allclose(became, expected, rtol=precision, atol=precision):
            raise _InexactError("it does more to its logits than a factor and soft-capping")
        return scale, softcap


class _InexactError(Exception):
    """Why the memory-lean loss does not give a model's own loss."""


def _log(core: nn.Module, reason: _InexactError) -> None:
    logger.warning(
        f"the memory-lean loss is not exact for {type(core).__name__} ({reason}): the model's own loss is used"
    )


def _shifted(labels: Tensor) -> Tensor:
    """The target of each position: the label after it."""
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def _mean(found: dict[str, Any], core: nn.Module) -> float:
    """The loss as the model itself computes it, with the auxiliary one."""
    auxiliary = 0.0 if found["auxiliary"] is None else _coefficient(core) * float(found["auxiliary"])
    return float(found["loss"] / found["targets"]) + auxiliary


def _with_targets(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states (positions, size) and their targets; on a CPU only those of positions that have one."""
    places = _places(targets.flatten())
    return hidden.flatten(0, -2)[places], targets.flatten()[places]


def _places(targets: Tensor) -> Tensor | slice:
    """Which of the targets (positions,) are computed: on a CPU those that are not -100."""
    if not targets.is_cpu:  # their number is not known on the host
        return slice(None)
    places = (targets != IGNORED).nonzero()[:, 0]
    return slice(None) if len(places) == len(targets) else places


def _unlabelled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}


@contextlib.contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module, below its hooks."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


def _without_cache(core: nn.Module) -> dict[str, bool]:
    """`use_cache=False` if the model has that argument: keys and values would be kept, and packed rows not be seen."""
    parameters = inspect.signature(type(core).forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    has_cache = hasattr(getattr(core, "config", None), "use_cache")
    return {"use_cache": False} if "use_cache" in parameters or (takes_any and has_cache) else {}


def _get(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _own_loss(
    model: nn.Module,
    core: nn.Module,
    inputs: Mapping[str, Any],
    num_items_in_batch: Tensor | float | None,
    options: LossOptions,
    router_aux_loss_coef: float | None,
) -> tuple[Tensor, LossFigures]:
    """The loss that the model computes; the figures from its logits."""
    if options != PLAIN or router_aux_loss_coef not in (None, _coefficient(core)):
        raise ModelError(
            f"{type(core).__name__} computes its own loss, in which {options} and "
            f"router_aux_loss_coef={router_aux_loss_coef} cannot be set. Leave them at their defaults, or pass a loss "
            "function."
        )
    passed = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
    outputs = model(**inputs, **_without_cache(core), **(passed if _takes_count(core) else {}))
    loss: Tensor = _get(outputs, "loss")
    shifted = "shift_labels" not in inputs
    labels = inputs["labels"][..., 1:] if shifted else inputs["shift_labels"]
    inputs_length = labels.shape[-1] + shifted
    with torch.no_grad():
        # A wrapper may have put positions of its own in front (prompt tuning).
        logits = _get(outputs, "logits").detach()[..., -inputs_length:, :]
        entropy, correct, count = _figures(logits[..., :-1, :] if shifted else logits, labels)
        divided = passed.get("num_items_in_batch", count) if _takes_count(core) else count
        figures = LossFigures(loss.detach() * divided, count, entropy, correct, _get(outputs, "aux_loss"))
    if num_items_in_batch is not None and not _takes_count(core):
        loss = loss * (count / num_items_in_batch)
    return loss, figures


def _takes_count(core: nn.Module) -> bool:
    parameters = inspect.signature(type(core).forward).parameters
    return any(
        p.kind is inspect.Parameter.VAR_KEYWORD or p.name == "num_items_in_batch" for p in parameters.values()
    )


def _figures(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    real = labels != IGNORED
    logs = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    entropy = torch.where(real, -(logs.exp() * logs).sum(dim=-1), 0).sum()
    return entropy, ((logits.argmax(dim=-1) == labels) & real).sum().to(entropy), real.sum().to(entropy)
