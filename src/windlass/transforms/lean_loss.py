"""The loss and the log-probabilities of a language model without its logits: head and softmax are one function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from windlass.core.attributes import takes
from windlass.core.errors import ModelError
from windlass.core.logs import get_job_logger, get_logger
from windlass.core.types import IGNORED
from windlass.metrics.tokens import comes_shifted
from windlass.transforms.lean_head import (
    InexactLossError,
    LeanHead,
    LossSums,
    coefficient_of,
    head_of,
    output_of,
    shifted,
    unlabelled,
    without_cache,
)
from windlass.transforms.linear_cross_entropy import LossOptions
from windlass.transforms.linear_log_probabilities import TokenLogProbabilities, log_probabilities_of
from windlass.transforms.staged_model import staged_of

logger, job_logger = get_logger(__name__), get_job_logger(__name__)
Found = TypeVar("Found")
PLAIN = LossOptions()


def lean_causal_lm_loss(
    model: nn.Module,
    inputs: Mapping[str, Any],
    num_items_in_batch: Tensor | float | None = None,
    *,
    options: LossOptions = PLAIN,
    router_aux_loss_coef: float | None = None,
) -> tuple[Tensor, LossSums]:
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
        The loss, a scalar with a graph, and what was counted, without gradients.

    Raises:
        ModelError: `inputs` have no labels; or options are set that the model's own loss does not have.
    """
    _check_labels(inputs)
    core = core_of(model)
    found = _without_logits(model, core, lambda head: head.loss(model, inputs, options))
    staged = staged_of(core)
    if found is None and (staged is None or not staged.in_step) and _alters_targets(options):
        found = _of_logits(model, core, inputs, options)
    if found is None:
        return _own_loss(model, core, inputs, num_items_in_batch, options, router_aux_loss_coef)
    coefficient = coefficient_of(core) if router_aux_loss_coef is None else router_aux_loss_coef
    return whole_loss(found, num_items_in_batch, coefficient), found.detached()


def whole_loss(sums: LossSums, num_items_in_batch: Tensor | float | None, coefficient: float) -> Tensor:
    """The loss of a batch from its sums, a scalar with a graph.

    Args:
        num_items_in_batch: divides the sum of losses; None: the number of targets.
        coefficient: factor of the auxiliary loss.
    """
    loss = sums.loss / (sums.targets.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    return loss if sums.auxiliary is None else loss + coefficient * sums.auxiliary.to(loss)


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
    core = core_of(model)
    found = _without_logits(model, core, lambda head: head.log_probabilities(model, inputs))
    if found is not None:
        return found
    outputs = model(**unlabelled(core, inputs), **without_cache(core))
    targets = inputs["shift_labels"] if comes_shifted(inputs) else shifted(inputs["labels"])
    # A wrapper may have put positions of its own in front.
    logits = output_of(outputs, "logits")[..., -targets.shape[-1] :, :]
    return log_probabilities_of(logits, targets), output_of(outputs, "aux_loss")


def _check_labels(inputs: Mapping[str, Any]) -> None:
    if not comes_shifted(inputs) and inputs.get("labels") is None:
        raise ModelError(f"the batch has the keys {sorted(inputs)}, and no labels to compute a loss from")


def core_of(model: nn.Module) -> nn.Module:
    """The outermost module whose class has a head."""
    for module in model.modules():
        if callable(getattr(type(module), "get_output_embeddings", None)):
            return module
    raise ModelError(
        f"{type(model).__name__} has no get_output_embeddings, so its head is not known. Give its class that "
        "method, or switch the memory-lean loss off."
    )


def is_compiled(model: nn.Module, core: nn.Module) -> bool:
    """Return True if a graph of the whole forward was or will be made: it would be made again for every loss."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return True
        if module is core:
            break
    return False


# Of each head that was measured; None if only the model's own loss is exact.
_known: weakref.WeakKeyDictionary[nn.Module, LeanHead | None] = weakref.WeakKeyDictionary()


def _without_logits(model: nn.Module, core: nn.Module, run: Callable[[LeanHead], Found]) -> Found | None:
    """What `run` returns with the model's head, which is measured once; None, after one line in the log, if only the
    model's own loss is exact.
    """
    staged = staged_of(core)
    if staged is not None and (staged.lean_head is None or not staged.in_step):
        return None  # the result of a forward of all stages has logits, and no rank but one has the head
    head = head_of(core)
    key = head if isinstance(head, nn.Module) else core
    try:
        if staged is not None:
            _known[key] = staged.lean_head  # of the whole model: a stage cannot be measured
        known = _known.get(key)
        if key not in _known or (known is not None and not known.is_of(core)):
            # Before the measurement: one that fails is not repeated for each batch.
            _known[key] = None
            if is_compiled(model, core):
                raise InexactLossError("it is compiled as a whole; compile its layers")
            _known[key] = LeanHead.measured(_within_engine(model), core)
        found = _known[key]
        return None if found is None else run(found)
    except InexactLossError as reason:
        _known[key] = None
        said = job_logger if staged is None else logger  # a stage may be the only one with a loss
        said.warning(
            f"the memory-lean loss is not exact for {type(core).__name__} ({reason}): the model's own loss is used"
        )
        return None


def _within_engine(model: nn.Module) -> nn.Module:
    """What data parallelism wraps, which is run for a measurement. FSDP2 wraps nothing, and gathers what a forward of a
    whole model needs.
    """
    package = type(model).__module__.partition(".")[0]
    is_engine = isinstance(model, nn.parallel.DistributedDataParallel) or package == "deepspeed"
    return model.module if is_engine else model  # type: ignore[return-value]


def _alters_targets(options: LossOptions) -> bool:
    """Return True if these set what the model's own loss does not have and its logits give, and that alone."""
    others = replace(options, label_smoothing=0.0, dynamic=False)
    return others == PLAIN != options


def _of_logits(
    model: nn.Module, core: nn.Module, inputs: Mapping[str, Any], options: LossOptions
) -> LossSums:
    """The sums from whole logits, of a causal model: the head is not a plain linear layer, or the forward is one of all
    stages, which returns whole logits on every rank.
    """
    outputs = model(**unlabelled(core, inputs), **without_cache(core))
    logits, targets = _with_targets(output_of(outputs, "logits"), inputs)
    logs = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    real = targets != IGNORED
    chosen = logs.gather(-1, torch.where(real, targets, 0)[..., None])[..., 0]
    own = chosen * chosen.detach().exp() if options.dynamic else chosen
    losses = (options.label_smoothing - 1.0) * own - options.label_smoothing * logs.mean(-1)
    sums = torch.where(real, losses, 0).sum()
    return LossSums(sums, *_figures(logits.detach(), targets), output_of(outputs, "aux_loss"))


def _with_targets(logits: Tensor, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The logits that predict a label of a causal model, and the labels. A wrapper may have put learnt positions in
    front; the last of them predicts the first label.
    """
    if comes_shifted(inputs):
        return logits, inputs["shift_labels"]
    labels: Tensor = inputs["labels"]
    predicted = labels if logits.shape[-2] > labels.shape[-1] else labels[..., 1:]
    return logits[..., -predicted.shape[-1] - 1 : -1, :], predicted


def _own_loss(
    model: nn.Module,
    core: nn.Module,
    inputs: Mapping[str, Any],
    num_items_in_batch: Tensor | float | None,
    options: LossOptions,
    router_aux_loss_coef: float | None,
) -> tuple[Tensor, LossSums]:
    """The loss that the model computes; the figures from its logits."""
    if options != PLAIN or router_aux_loss_coef not in (None, coefficient_of(core)):
        raise ModelError(
            f"{type(core).__name__} computes its own loss, in which {options} and "
            f"router_aux_loss_coef={router_aux_loss_coef} cannot be set. Leave them at their defaults, or pass a loss "
            "function."
        )
    takes_count = takes(type(core).forward, "num_items_in_batch")
    given = (
        {} if num_items_in_batch is None or not takes_count else {"num_items_in_batch": num_items_in_batch}
    )
    outputs = model(**inputs, **without_cache(core), **given)
    loss: Tensor = output_of(outputs, "loss")
    with torch.no_grad():
        entropy, correct, count = _figures(*_with_targets(output_of(outputs, "logits").detach(), inputs))
        # A mean over no targets is not a number in most models, and their sum is 0.
        total = torch.where(count == 0, 0, loss.detach() * given.get("num_items_in_batch", count))
        figures = LossSums(total, entropy, correct, count, output_of(outputs, "aux_loss")).detached()
    if num_items_in_batch is not None and not takes_count:
        loss = torch.where(count == 0, 0, loss * (count / num_items_in_batch))
    return loss, figures


def _figures(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    real = labels != IGNORED
    logs = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    entropy = torch.where(real, -(logs.exp() * logs).sum(dim=-1), 0).sum()
    return entropy, ((logits.argmax(dim=-1) == labels) & real).sum().to(entropy), real.sum().to(entropy)
