"""The configuration of a model with the same kinds of layers as a large one, small enough to train in a second.

What stays: kinds of layers and their order, the ratio of heads to key-value heads (up to 4), windows, experts, ties,
norms, biases, activations, scales. Sizes shrink to ones that the axes of a layout divide exactly if they divide the
large ones. Dropout is off.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.core.errors import ModelError, Problem, did_you_mean, named, refuse

_WITH_OWN_SAMPLES = ("dp", "dp_shard", "ep")
AXES = ("dp", "dp_shard", "ep", "tp", "cp", "sp", "pp")
_SPELLINGS = {
    "dp_replicate": "dp",
    "replicate": "dp",
    "replicas": "dp",
    "ddp": "dp",
    "shard": "dp_shard",
    "fsdp": "dp_shard",
    "shards": "dp_shard",
    "context": "cp",
    "sequence": "sp",
    "tensor": "tp",
    "pipeline": "pp",
    "expert": "ep",
}
MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """Sizes of axes, of which those above 1 are in use.

    Attributes:
        sizes: axis -> number of ranks along it, in the order of `AXES`, without those of 1.
    """

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> AxisLayout:
        """The layout with these sizes. Axes of 1 are left out."""
        return cls(tuple((axis, sizes[axis]) for axis in AXES if sizes.get(axis, 1) > 1))

    @classmethod
    def parse(cls, text: str, field: str = "--layout") -> AxisLayout:
        """Read `tp=2,cp=2`. Raises ConfigError with every part that is not an axis and its size."""
        sizes: dict[str, int] = {}
        problems = []
        for part in filter(None, text.replace(",", " ").replace(" x ", " ").split()):
            name, _, size = part.partition("=")
            word = name.strip().removesuffix("_size").replace("-", "_")
            axis = _SPELLINGS.get(word, word)
            if axis not in AXES:
                fix = f"there is no axis {name!r}{did_you_mean(word, (*AXES, *_SPELLINGS))}; axes: {', '.join(AXES)}"
                problems.append(Problem(field, part, fix))
            elif not size.isdecimal() or int(size) < 1:
                problems.append(Problem(field, part, f"write {name}=SIZE, with a size of 1 or more"))
            elif axis in sizes:
                problems.append(Problem(field, part, f"{axis} is set twice; leave one out"))
            else:
                sizes[axis] = int(size)
        refuse(problems)
        return cls.of(sizes)

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self.sizes) or "one process"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in use."""
        return tuple(axis for axis, _ in self.sizes)

    def along(self, *axes: str) -> int:
        """The product of the sizes of `axes`."""
        return math.prod(size for axis, size in self.sizes if axis in axes)

    @property
    def processes(self) -> int:
        """How many there are in all."""
        return math.prod(size for _, size in self.sizes)

    @property
    def data_ranks(self) -> int:
        """How many of them have different samples."""
        return self.along(*_WITH_OWN_SAMPLES)

    def reduced(self) -> AxisLayout:
        """The layout that is tried in place of this one: this one, if few processes suffice; else axes above 2 have 2
        ranks, so that each axis is still there.
        """
        if self.processes <= MOST_PROCESSES:
            return self
        # Two ranks show all that an axis does: dividing, exchanging, and an order among them.
        return AxisLayout(tuple((axis, 2) for axis, _ in self.sizes))

    def parts(self) -> Iterator[AxisLayout]:
        """Every layout of some of the axes, those of fewer axes first, without this one."""
        for count in range(1, len(self.sizes)):
            for chosen in itertools.combinations(self.sizes, count):
                yield AxisLayout(chosen)


VOCABULARY, POSITIONS, WINDOW = 64, 64, 5
_HEAD, _MOST_RATIO, _BEFORE_SCALING = 8, 4, 16
# What does not change how a model computes.
_LEFT_OUT = (
    "_name_or_path",
    "_attn_implementation",
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "label2id",
    "initializer_range",
    "init_std",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "quantization_config",
    "return_dict",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_POSITIONS = ("max_position_embeddings", "max_seq_len")
_WINDOWS = ("sliding_window", "attention_chunk_size")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "intermediate_size_mlp",
)
# Latent attention, and rotations of a part of a head.
_INSIDE_HEADS = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "rotary_dim": 4,
}
_NESTED = ("text_config", "vision_config", "encoder", "decoder")


def shrink(
    config: Mapping[str, Any], names: Mapping[str, str], layout: AxisLayout, stages: int = 1
) -> dict[str, Any]:
    """The configuration of the small model.

    Args:
        config: of a decoder of transformers, as `config.to_dict()` returns it.
        names: its `attribute_map`: common name of a size -> its name in `config`.
        layout: what is to divide the model.
        stages: of each rank of a pipeline.

    Raises:
        ModelError: it is not the configuration of a decoder.
    """
    found = _Sizes({k: v for k, v in config.items() if k not in _LEFT_OUT}, names)
    kind = config.get("model_type", "?")
    if any(isinstance(config.get(name), Mapping) for name in _NESTED) or config.get("is_encoder_decoder"):
        raise ModelError(f"a model of type {kind} is not a decoder of text alone; only these are proven")
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        if not isinstance(found.get(name), int):
            raise ModelError(
                f"the configuration of {kind} has no {name}, from which a small model would be made"
            )
    _shrink_layers(found, max(2, layout.along("pp") * stages))
    _shrink_widths(found, layout)
    _shrink_experts(found, layout.along("ep", "tp"))
    _shrink_positions(found)
    found.values.update({name: token for name, token in _TOKENS.items() if name in found.values})
    for name, value in found.values.items():
        # Ranks draw other numbers than one process, so that nothing could be compared.
        if ("drop" in name and isinstance(value, float)) or name == "router_jitter_noise":
            found.values[name] = 0.0
    return found.values


def check_kinds(config: Any, small: dict[str, Any]) -> None:
    """Raise ModelError if no model can be made with the values of `shrink`, or it lacks a kind of layer: the class of a
    configuration may compute the kinds from sizes that other models do not have.
    """
    try:
        made = type(config).from_dict(dict(small))
    except Exception as error:  # they compare their sizes with each other, and raise errors of any class
        raise ModelError(
            f"a model of type {config.model_type} cannot be made small: {named(error)}"
        ) from error
    wanted, found = len(_computed_kinds(config)), len(_computed_kinds(made))
    if found < wanted:
        raise ModelError(
            f"layers of a model of type {config.model_type} are of {wanted} kinds, of which its small model would have "
            f"{found}: nothing could be said of the others"
        )


def _computed_kinds(config: Any) -> set[tuple[str, ...]]:
    """The kinds of layers by the lists that the class of a configuration computes, of one value for each layer."""
    own = [kind for kind in type(config).__mro__ if kind.__module__ != "transformers.configuration_utils"]
    lists = []
    for name in sorted(
        {name for kind in own for name, value in vars(kind).items() if isinstance(value, property)}
    ):
        with contextlib.suppress(Exception):  # one that another kind of model has is not there
            value = getattr(config, name)
            if isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers:
                lists.append(map(str, value))
    return set(zip(*lists, strict=True))


class _Sizes:
    """The values of a configuration under their common names."""

    def __init__(self, values: dict[str, Any], names: Mapping[str, str]) -> None:
        self.values, self._names = values, names

    def get(self, name: str) -> Any:
        return self.values.get(self._names.get(name, name))

    def set(self, name: str, value: Any) -> None:
        """Replace a value that is there."""
        own = self._names.get(name, name)
        if own in self.values:
            self.values[own] = value


def _like(large: int, small: int, parts: int) -> int:
    """A number of about `small` that `parts` divides if it divides `large`; never above it."""
    if large <= small:
        return large
    if large % parts == 0:
        return -(-small // parts) * parts
    return next(n for n in range(small, small + parts + 2) if n % parts)


def _shrink_layers(found: _Sizes, least: int) -> None:
    """Keep the first layer of each kind, and at least `least` layers."""
    count = found.get("num_hidden_layers")
    sparse = _sparse_layers(found.values, count)
    lists = {
        name: value
        for name, value in found.values.items()
        if isinstance(value, list) and len(value) == count and name != "mlp_only_layers"
    }
    kinds = [(sparse[layer], *(str(value[layer]) for value in lists.values())) for layer in range(count)]
    first = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    kept = sorted(first.values())
    kept = sorted(
        [*kept, *[layer for layer in range(count) if layer not in kept][: max(0, least - len(kept))]]
    )
    found.set("num_hidden_layers", len(kept))
    for name, value in lists.items():
        found.values[name] = [value[layer] for layer in kept]
    dense = [place for place, layer in enumerate(kept) if not sparse[layer]]
    if "first_k_dense_replace" in found.values:
        found.values["first_k_dense_replace"] = len(dense)
    if "mlp_only_layers" in found.values:
        found.values.update(mlp_only_layers=dense, decoder_sparse_step=1)
    for name in (
        "max_window_layers",
        "no_rope_layer_interval",
        "_sliding_window_pattern",
        "sliding_window_pattern",
    ):
        if "layer_types" in found.values or "no_rope_layers" in found.values:
            found.values.pop(name, None)


def _sparse_layers(values: Mapping[str, Any], count: int) -> list[bool]:
    """Which layers have experts, as far as it differs between layers."""
    dense, step = values.get("first_k_dense_replace") or 0, values.get("decoder_sparse_step") or 1
    only = values.get("mlp_only_layers") or ()
    return [layer >= dense and layer not in only and (layer + 1) % step == 0 for layer in range(count)]


def _shrink_widths(found: _Sizes, layout: AxisLayout) -> None:
    # Heads are divided among the ranks of `tp`, and exchanged among those of `sp`.
    per_heads, per_layer = layout.along("tp", "sp"), layout.along("tp")
    heads, width = found.get("num_attention_heads"), found.get("hidden_size")
    keys = next((found.get(name) for name in _KEY_HEADS if isinstance(found.get(name), int)), heads)
    if found.get("multi_query") and not found.get("new_decoder_architecture"):
        keys = 1
    few_keys = _like(keys, 2 * per_heads, per_heads)  # two to a rank, so that their order matters
    few_heads = few_keys * min(heads // keys, _MOST_RATIO) if heads % keys == 0 else heads
    if keys == 1:
        few_heads = _like(heads, min(heads, 4), per_heads)
    found.set("num_attention_heads", few_heads)
    for name in _KEY_HEADS:
        if isinstance(found.get(name), int):
            found.set(name, few_heads if found.get(name) == heads else few_keys)
    head = found.get("head_dim") or width // heads
    small_head = min(head, _HEAD)
    # Some models have heads that together are wider or narrower than their layers.
    small = few_heads * small_head if head * heads == width else few_heads * small_head * 3 // 2
    found.set("hidden_size", small)
    if found.get("head_dim"):
        found.set("head_dim", small_head)
    for name in _WIDTHS:
        if isinstance(found.get(name), int):
            found.set(name, _like(found.get(name), 24, per_layer))
    if found.get("ffn_hidden_size"):  # four times the width, by what the model's layers assume
        found.set("ffn_hidden_size", 4 * small)
    for name, size in _INSIDE_HEADS.items():
        if isinstance(found.get(name), int):
            found.set(name, min(found.get(name), size))
    if found.get("word_embed_proj_dim"):
        found.set("word_embed_proj_dim", small if found.get("word_embed_proj_dim") == width else small // 2)
    found.set("vocab_size", _like(found.get("vocab_size"), VOCABULARY, per_layer))


def _shrink_experts(found: _Sizes, ranks: int) -> None:
    experts = next((found.get(name) for name in _EXPERTS if isinstance(found.get(name), int)), None)
    if experts is None:
        return
    few = _like(experts, max(4, 2 * ranks), ranks)
    for name in _EXPERTS:
        if isinstance(found.get(name), int):
            found.set(name, few)
    if isinstance(found.get("num_experts_per_tok"), int):
        found.set("num_experts_per_tok", min(found.get("num_experts_per_tok"), 2))
    if (found.get("n_group") or 1) > 1:
        found.set("n_group", 2)
        found.set("topk_group", 1)


def _shrink_positions(found: _Sizes) -> None:
    for name in _POSITIONS:
        if isinstance(found.get(name), int):
            found.set(name, POSITIONS)
    for name in _WINDOWS:
        if found.get(name):  # 0 and None are no window
            found.set(name, min(found.get(name), WINDOW))
    found.set("original_max_position_embeddings", _BEFORE_SCALING)
    head = found.get("head_dim") or found.get("hidden_size") // found.get("num_attention_heads")
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found.values.get(name), Mapping):
            found.values[name] = _shrink_rope(found.values[name], head)


def _shrink_rope(rope: Mapping[str, Any], head: int) -> dict[str, Any]:
    """Rotations for heads of another width: lists have a factor for each pair of a head's elements."""
    made: dict[str, Any] = {}
    pairs = int(head * (rope.get("partial_rotary_factor") or 1.0)) // 2
    for name, value in rope.items():
        if isinstance(value, Mapping):  # of one kind of layer
            made[name] = _shrink_rope(value, head)
        elif name == "original_max_position_embeddings":
            made[name] = _BEFORE_SCALING
        elif isinstance(value, list):
            made[name] = value[:pairs]
        else:
            made[name] = value
    return made
