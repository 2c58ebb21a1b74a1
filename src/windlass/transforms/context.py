"""Forwards of a decoder whose sequences are divided among ranks: a whole batch goes in, results of whole rows come out.

The ranks of one context get the same batch. Each computes its part of the rows; the loss is the sum of the parts, and
logits are gathered if they are read. So whatever counts, weighs or measures a batch sees what one process sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.core.errors import ConfigError, DataError, ModelError, Problem
from windlass.core.optional import is_imported, require
from windlass.core.rng import ForwardRandomness
from windlass.core.trees import map_leaves
from windlass.core.types import CACHES
from windlass.dist.gang import Gang
from windlass.transforms.divided_output import DividedOutput
from windlass.transforms.divided_sequences import NAME, Division, divide, divided_attention, divided_mask
from windlass.transforms.document_mask import BORDERS
from windlass.transforms.evaluating import evaluating, rounding, short_row
from windlass.transforms.linear_exchange import exchange
from windlass.transforms.ulysses import refuse_heads
from windlass.transforms.zigzag import Zigzag

_COLUMNS = {"input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "num_items_in_batch"}
# Arguments of a step of generation, which runs on whole rows.
_GENERATING = (*CACHES, "cache_position", "use_cache", "logits_to_keep")
_HIDDEN = ("output_hidden_states", "output_attentions", "output_router_logits")
_LAYERS = {"full_attention", "sliding_attention"}  # transformers' names
_TRAIN_WHOLE = "Train it with cp_size=1 and sp_size=1."


class DividedForwards:
    """Divides the batches that a model gets, until `release`.

    Forwards of generation, and those that get a cache or `use_cache=True`, run on whole rows on each rank.

    Args:
        module: the model of transformers, or a wrapper of it.
        context_ranks: the ranks that divide the rows; each forward needs all of them. Keys and values travel among
            those of its view "ring", and those of "heads" exchange heads.
        unit_dtype: see `Strategy`.

    Attributes:
        division: of the rows of the forward that is under way; None if they are whole.

    Raises:
        ConfigError: the heads cannot be divided among the ranks. Collective: a short row is run both ways.
        ModelError: the attention of the model cannot be replaced, or its results on divided rows differ.
    """

    def __init__(self, module: nn.Module, context_ranks: Gang, unit_dtype: torch.dtype | None = None) -> None:
        self._model, self._ranks = _model_of_transformers(module), context_ranks
        _refuse_unfit(self._model, context_ranks)
        self.division: Division | None = None
        self._length, self._compared = 0, set[bool]()
        self._randomness = ForwardRandomness(next(self._model.parameters()).device, context_ranks.rank)
        compared = context_ranks.exists or context_ranks.mesh.pipeline == 1
        expected = self._short_row() if compared else None
        self._before = self._model.config.get_text_config()._attn_implementation
        transformers = require("transformers", "divide sequences among ranks")
        transformers.AttentionInterface.register(NAME, divided_attention)
        transformers.AttentionMaskInterface.register(NAME, divided_mask)
        self._model.set_attn_implementation(NAME)
        # Those of FSDP2 ran before: it sees the outputs of this rank's part.
        self._hooks = [
            self._model.register_forward_pre_hook(self._divide, with_kwargs=True),
            # After an error too: the ranks draw the same again.
            self._model.register_forward_hook(self._join, always_call=True),
        ]
        for rotation in filter(_follows_length, self._model.modules()):
            self._hooks += [
                rotation.register_forward_pre_hook(self._add_longest, with_kwargs=True),
                rotation.register_forward_hook(self._drop_longest),
            ]
        _divided[id(self._model)] = self
        try:
            if expected is not None and self._ranks.exists:
                allowed = rounding(self._model, expected, unit_dtype)
                self._refuse_difference(expected, self._short_row(), allowed)
            self._compared.clear()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Restore the model's own attention."""
        for hook in self._hooks:
            hook.remove()
        _divided.pop(id(self._model), None)
        self._model.set_attn_implementation(self._before)

    # --- forwards ---------------------------------------------------------------------------------------------------

    def _divide(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        batch = {**dict(zip(("input_ids",), args, strict=False)), **kwargs}
        self.division = None
        if any(_is_set(batch.get(name)) for name in _GENERATING):
            return None
        # Positions say the same as the borders, which count tokens of whole rows.
        known = BORDERS if batch.get("position_ids") is not None else ()
        given = {name: value for name, value in batch.items() if value is not None and name not in known}
        _refuse_columns(given, len(args))
        self._compare(given["input_ids"])
        part = divide(given, self._ranks)
        self.division, self._length = part["divided"], given["input_ids"].shape[1]
        others = {name: value for name, value in given.items() if name not in _COLUMNS}
        if module.training:
            self._randomness.begin()
        return (), {**others, **part, "return_dict": True}

    def _add_longest(
        self, rotation: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add the largest position of the whole rows to those of this rank: a rotation may choose its frequencies by
        it, and ranks with other parts would choose others. `_drop_longest` removes what is made of it.
        """
        if self.division is None:
            return None
        given = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
        positions = given["position_ids"]
        longest = self.division.longest.expand(*positions.shape[:-1], 1)
        return (), {**given, "position_ids": torch.cat([positions, longest], -1)}

    def _drop_longest(self, rotation: nn.Module, inputs: Any, output: Any) -> Any:
        return output if self.division is None else map_leaves(lambda angles: angles[:, :-1], output)

    def _join(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """The results of whole rows; see `DividedOutput`."""
        division, self.division = self.division, None
        if division is None:
            return output
        if module.training:
            self._randomness.end()
        if output is None:  # an error is raised
            return None
        for name in ("aux_loss", "auxiliary"):  # a balancing loss, of which each rank has an equal share
            if output.get(name) is not None:
                output[name] = output[name] * self._ranks.size
        whole = partial(_whole, zigzag=division.zigzag, length=self._length, context_ranks=self._ranks)
        if "made" in output:  # in place of logits, by `lean_loss.py`: for each token, or sums over tokens
            made, *figures = (
                whole(value) if value.dim() == 2 else self._sum(value)
                for value in (output["made"], *output["figures"])
            )
            return {**output, "made": made, "figures": tuple(figures)}
        logits = output.gathered if isinstance(output, DividedOutput) else output["logits"]
        if output.get("loss") is None:
            output["logits"] = whole(logits)
            return output
        return DividedOutput(self._sum(output["loss"]), partial(whole, logits), output.get("aux_loss"))

    def _sum(self, share: Tensor) -> Tensor:
        # Gradients are averaged over ranks later, so that each part is multiplied by their number.
        ranks = self._ranks
        return exchange(
            share,
            lambda own: ranks.sum_on_device(own.detach().clone()),
            lambda gradient: gradient * ranks.size,
        )

    def _compare(self, ids: Tensor) -> None:
        """Check in the first forward of training, and of evaluation, that the ranks have the same batch."""
        # Once for each: later batches come from the same loaders, and an exchange costs a wait for the device.
        if self._model.training in self._compared:
            return
        self._compared.add(self._model.training)
        places = torch.arange(1, ids.numel() + 1, device=ids.device)
        found = self._ranks.gather_objects([*ids.shape, int((ids.flatten() * places).sum())])
        if any(other != found[0] for other in found):
            raise DataError(
                f"the {len(found)} ranks that divide the sequences of a batch were given different batches. Give all "
                "of them the same one: shard data over `accelerator.num_processes // (cp_size * sp_size)` ranks"
            )

    # --- the check --------------------------------------------------------------------------------------------------

    def _short_row(self) -> tuple[Tensor, Tensor]:
        """Logits and loss of a short row."""
        ids = short_row(self._model, 6 * self._ranks.size, next(self._model.parameters()).device)
        with evaluating(self._model):
            outputs = self._model(input_ids=ids, labels=ids, use_cache=False)
        if outputs.get("loss") is None or outputs["logits"].shape[:2] != ids.shape:
            name = type(self._model).__name__
            raise ModelError(f"{name} does not predict each token from those before it. {_TRAIN_WHOLE}")
        return outputs["logits"], outputs["loss"]

    def _refuse_difference(
        self, expected: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor], allowed: float
    ) -> None:
        """Raise ModelError on all ranks if the logits or the loss on divided rows differ: else others would wait."""
        worst: list[list[Any]] = []
        for what, whole, divided in zip(("logits", "loss"), expected, got, strict=True):
            difference, scale = float((divided - whole).abs().max()), float(whole.abs().max())
            if not difference <= allowed * scale:
                worst.append([what, difference, scale])
        for what, difference, scale in [
            each for found in self._ranks.gather_objects(worst) for each in found
        ]:
            raise ModelError(
                f"{type(self._model).__name__} computes other {what} on divided sequences, different by "
                f"{difference:.2g} (up to {scale:.2g}). Its layers mix tokens outside of attention, compute in a lower "
                f"precision, or its loss does not divide by `num_items_in_batch`. {_TRAIN_WHOLE}"
            )


_divided: dict[int, DividedForwards] = {}


def has_divided_sequences(model: nn.Module) -> bool:
    """Return True if forwards of `model` divide their batches, and get `shift_labels` in parts."""
    return id(model) in _divided


def division_of(model: nn.Module) -> Division | None:
    """How the rows of the forward of `model` that is under way are divided; None: they are whole."""
    held = _divided.get(id(model))
    return None if held is None else held.division


def _whole(part: Tensor | Callable[[], Tensor], zigzag: Zigzag, length: int, context_ranks: Gang) -> Tensor:
    """Values of the tokens of whole rows, on every rank, which all compute the same with them. Collective, without
    communication in the backward.

    Args:
        part: those of this rank's tokens; or of logits that are divided over the vocabulary too, what gathers them.
        length: tokens of a row, without padding.
    """
    rank, size = context_ranks.rank, context_ranks.size
    gathered = exchange(
        part if isinstance(part, Tensor) else part(),
        partial(_gathered, context_ranks=context_ranks),
        lambda gradient: gradient.chunk(size, 1)[rank] * size,
    )
    return zigzag.whole(gathered, 1)[:, :length]


def _gathered(part: Tensor, context_ranks: Gang) -> Tensor:
    """The parts of all ranks along the second axis."""
    parts = [torch.empty_like(part) for _ in range(context_ranks.size)]
    dist.all_gather(parts, part.contiguous(), group=context_ranks.device_group)
    return torch.cat(parts, 1)


# --- refusals ---------------------------------------------------------------------------------------------------------


def _model_of_transformers(module: nn.Module) -> Any:
    """The one outermost model of transformers in `module`."""
    if is_imported("transformers"):
        kind = require("transformers", "divide sequences among ranks").PreTrainedModel
        for part in module.modules():
            if isinstance(part, kind) and part._can_set_attn_implementation():
                return part
    raise ModelError(
        f"{type(module).__name__} has an attention that cannot be replaced, so its sequences cannot be divided among "
        f"ranks. {_TRAIN_WHOLE}"
    )


def _refuse_unfit(model: Any, context_ranks: Gang) -> None:
    config = model.config.get_text_config()
    exchanging = context_ranks.over("heads").size
    if exchanging > 1:
        heads, divided = config.num_attention_heads, context_ranks.over("tensor").size
        keys = getattr(config, "num_key_value_heads", None) or heads
        refuse_heads(heads // divided, keys // divided, exchanging)
    if getattr(model.config, "is_encoder_decoder", False):
        fix = "has an encoder, whose sequences are not divided; set cp_size=1 and sp_size=1"
        raise ConfigError(Problem("model", type(model).__name__, fix))
    # Not by a forward: labels that are no classes of it end a process on a device.
    if model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model).__name__} has no output embeddings, so it does not predict the next token of each, and its "
            f"sequences cannot be divided among ranks. {_TRAIN_WHOLE}"
        )
    if (mixer := _mixer(model, config)) is not None:
        raise ModelError(
            f"{type(model).__name__} mixes tokens in another way than attention to earlier ones ({mixer}), so its "
            f"sequences cannot be divided among ranks. {_TRAIN_WHOLE}"
        )
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(config, name, 0.0):
            fix = "is not built for attention on divided rows: set it to 0, or cp_size and sp_size to 1"
            raise ConfigError(Problem(f"model.config.{name}", getattr(config, name), fix))


def _mixer(model: Any, config: Any) -> str | None:
    """A layer that needs the tokens around each one in another way than attention to earlier ones; None if none is
    known. What this does not know shows in the results, which a rehearsal without values does not have.
    """
    # By name: what begins after thousands of tokens, as chunks do, does not show in the results of a short row.
    others: set[str] = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if others:
        return min(others)
    if getattr(config, "attn_temperature_tuning", False):  # by the place of a token in what the layer gets
        return "attn_temperature_tuning"
    # A convolution over tokens has a filter for each channel; those of encoders of sound or images mix channels.
    convolutions = (
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Conv1d) and layer.groups == layer.in_channels > 1
    )
    return next(convolutions, None)


def _follows_length(module: nn.Module) -> bool:
    """Return True for a rotation whose frequencies depend on the largest position of a batch."""
    kinds: Any = getattr(module, "rope_type", None)
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
        for kind in (kinds.values() if isinstance(kinds, Mapping) else (kinds,))
    )


def _refuse_columns(batch: Mapping[str, Any], positional: int) -> None:
    """Raise ModelError for arguments of a forward that cannot be divided."""
    odd = [name for name in _COLUMNS - {"num_items_in_batch"} if name in batch and batch[name].dim() != 2]
    unknown = [
        name
        for name, value in batch.items()
        if name not in _COLUMNS and not isinstance(value, bool | int | float | str)
    ]
    asked = [name for name in _HIDDEN if batch.get(name)]
    if positional > 1 or "input_ids" not in batch or odd or unknown or asked:
        found = sorted({*odd, *unknown, *asked}) or sorted(batch)
        raise ModelError(
            f"a forward on divided sequences got {', '.join(found)}, and takes by name {', '.join(sorted(_COLUMNS))}, "
            f"of shape (rows, tokens). Leave out the others. {_TRAIN_WHOLE}"
        )


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, int) and value == 0)
