"""The loss that a model of transformers computes itself, from logits that are divided over the vocabulary.

Each rank of a tensor gang makes the logits of its part of the vocabulary, and the model's loss function is replaced by
one that needs no others. Whole logits are made if they are read, or if a forward gets no labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.core.logs import get_job_logger
from windlass.core.types import IGNORED
from windlass.transforms.divided_output import DividedOutput
from windlass.transforms.evaluating import evaluating, short_row
from windlass.transforms.tensor_split import TensorSplit, split_cross_entropy, split_of

_log = get_job_logger(__name__)
_TRAINED = "Set tp_size=1, or return a loss of your own (compute_loss_func)."


class SplitLoss:
    """Has forwards with labels of a model compute their loss from its part of the logits.

    A model whose class does not call `loss_function`, or has another one than that of causal models, keeps whole
    logits; so does one whose loss on a short row then differs. Collective.

    Args:
        model: with a head that is divided (`tensor_layers.Head`).
    """

    def __init__(self, model: Any, head: Any) -> None:
        self._model, self._head, self._own = model, head, model.loss_function
        self._made = 0
        expected = self._short_row()
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, with_kwargs=True, always_call=True)
        self._used = True
        found = self._short_row()
        # In single precision, in which models compute their loss.
        if expected is None or found is None or not torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
            self._used = False
            _log.info(
                "%s makes whole logits for its own loss: it does not compute it from them alone",
                type(model).__name__,
            )

    def _short_row(self) -> Tensor | None:
        ids = short_row(self._model, 6, self._head.weight.device)
        with evaluating(self._model):
            try:
                loss: Tensor = self._model(input_ids=ids, labels=ids, use_cache=False)["loss"]
            except (ModelError, TypeError, ValueError, KeyError, RuntimeError):
                return None
        return loss

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._made = 0
        # Without labels the logits are read, as in generation, and are needed whole.
        self._head.in_parts = self._used and kwargs.get("labels") is not None
        if self._head.in_parts:
            self._model.loss_function = self._loss

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss of causal models of transformers: as its `ForCausalLMLoss`."""
        self._made += 1
        split: TensorSplit = self._head.split
        if logits.shape[-1] != len(split.mine):
            raise ModelError(f"{type(self._model).__name__} changes the shape of its logits. {_TRAINED}")
        targets = shift_labels
        if targets is None:
            assert labels is not None
            targets = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = targets.reshape(-1).to(logits.device)
        # As transformers does, whatever the model computes in.
        losses = split_cross_entropy(logits.float().flatten(0, -2), targets, split, ignore_index)
        return losses.sum() / (
            (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        )

    def _end(self, model: nn.Module, inputs: Any, kwargs: Any, output: Any) -> Any:
        """The output with logits that are gathered when they are read."""
        in_parts, self._head.in_parts = self._head.in_parts, False
        self._model.loss_function = self._own
        if not in_parts or output is None:  # None: an error is raised
            return output
        if self._made != 1:
            raise ModelError(
                f"{type(model).__name__} has not computed its loss by its loss function. {_TRAINED}"
            )
        part, split = output["logits"], self._head.split
        if set(output) - {"loss", "logits"}:
            output["logits"] = split.whole(part)
            return output
        return DividedOutput(output["loss"], lambda: split.whole(part))


def split_loss(module: nn.Module) -> None:
    """Have the model in `module` that has a divided head compute its own loss on parts of logits; see `SplitLoss`."""
    for model in module.modules():
        get_head: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
        head = None if get_head is None else get_head()
        if head is not None and hasattr(head, "in_parts") and split_of(head) is not None:
            if _has_causal_loss(model):
                SplitLoss(model, head)
            return


def _has_causal_loss(model: nn.Module) -> bool:
    """Return True if the class of `model` calls transformers' loss of causal models by its `loss_function`."""
    function = getattr(model, "loss_function", None)
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    where = getattr(function, "__module__", "") or ""
    is_causal = getattr(function, "__name__", "") == "ForCausalLMLoss" and where.startswith("transformers.")
    return is_causal and code is not None and "loss_function" in code.co_names
