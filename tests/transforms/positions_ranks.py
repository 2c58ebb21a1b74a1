"""Run on two ranks: what ranks that divide the positions of hidden states compute, keep and send."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from windlass.core.errors import ConfigError
from windlass.core.mesh import Mesh
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.dist.sharded import local, whole
from windlass.transforms import tensor_split
from windlass.transforms.recompute import apply_recompute
from windlass.transforms.tensor_parallel import TensorParallel
from windlass.transforms.tensor_split import Joined, TensorSplit

_SIZES: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BIASED = {"attention_bias": True, "mlp_bias": True}
_GPT2: dict[str, Any] = {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
_DROPS = {"resid_pdrop": 0.4, "attn_pdrop": 0.4, "embd_pdrop": 0.4}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LlamaConfig", _SIZES | {"intermediate_size": 48}),  # no part of it is as wide as the model
    "biased": ("LlamaConfig", _SIZES | _BIASED),
    "norms of heads": ("Qwen3Config", _SIZES | {"head_dim": 4}),
    "dropout": ("GPT2Config", _GPT2 | _DROPS),
    "dropout of layers that are not divided": ("GPT2Config", _GPT2 | {"attn_pdrop": 0.4, "resid_pdrop": 0.0}),
}
TOKENS = 8


def _model(name: str) -> Any:
    torch.manual_seed(0)
    kind, options = _MODELS[name]
    config = getattr(transformers, kind)(**options)
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.float64).train()


def _ids(tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, 24, (2, tokens), generator=torch.Generator().manual_seed(1))


def _loss(model: Any, ids: Tensor, **options: Any) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _divided(model: nn.Module, ranks: Gang, positions: bool = True) -> TensorParallel:
    return TensorParallel(model, ranks, torch.device("cpu"), positions)


def _equal(ranks: Gang) -> None:
    """Loss and gradients are those of a whole model, in rows that the ranks do not divide evenly too, after a forward
    that an error ended between two blocks.
    """
    for name in ("biased", "norms of heads"):
        plain = _model(name)
        model = copy.deepcopy(plain)
        strategy = _divided(model, ranks)
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            _loss(model, _ids())
        hook.remove()
        for tokens, options in ((8, {}), (7, {}), (9, {"output_hidden_states": True})):
            ids = _ids(tokens)
            expected = _loss(plain, ids)
            expected.backward()
            with strategy.micro(last=True):
                loss = _loss(model, ids, **options)
                loss.backward()
            assert (loss - expected).abs() < 1e-12, (name, tokens)
            wanted = {key: p.grad for key, p in plain.named_parameters()}
            for key, parameter in model.named_parameters():
                assert (whole(parameter.grad) - wanted[key]).abs().max() < 1e-12, (name, tokens, key)
            model.zero_grad()
            plain.zero_grad()
        found = model(input_ids=_ids(9), output_hidden_states=True)
        assert [each.shape[1] for each in found.hidden_states] == [9] * 3
        model.eval()
        with torch.no_grad(), strategy.gathered():
            expected = plain.eval()(_ids()).logits
            assert (model(_ids()).logits - expected).abs().max() < 1e-12, "whole parameters"
            rows = model.generate(_ids(4), max_new_tokens=3, do_sample=False)
        assert torch.equal(rows, plain.generate(_ids(4), max_new_tokens=3, do_sample=False))
        assert torch.equal(rows, model.generate(_ids(4), max_new_tokens=3, do_sample=False)), "one token each"
        seen: list[int] = []
        model.model.layers[1].input_layernorm.register_forward_hook(
            lambda _, __, out, seen=seen: seen.append(out.shape[1])
        )
        model(_ids())
        assert seen == [TOKENS // 2], "divided again"


def _kept(model: nn.Module) -> tuple[int, int]:
    """Bytes of activations of the model's width that norms keep for the backward, and that whole layers keep."""
    inside: list[nn.Module] = []
    found: dict[int, tuple[bool, int]] = {}
    parameters = {local(p).untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if inside and place not in parameters and tensor.shape[-1] == _SIZES["hidden_size"]:
            of_norm, _ = found.get(place, (False, 0))
            found[place] = of_norm or len(inside) > 1, tensor.untyped_storage().nbytes()
        return tensor

    for layer in model.model.layers:
        for part in (layer, layer.input_layernorm, layer.post_attention_layernorm):
            part.register_forward_pre_hook(lambda part, _: inside.append(part))
            part.register_forward_hook(lambda *_: inside.remove(inside[-1]))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(model, _ids())
    assert loss.requires_grad, "what is kept is there until here"
    return sum(n for of_norm, n in found.values() if of_norm), sum(n for _, n in found.values())


def _sent(model: nn.Module, strategy: TensorParallel, patch: pytest.MonkeyPatch) -> float:
    """Bytes that this rank of two sends in a forward and a backward, without the exchange of gradients."""
    total = [0.0]

    def counted(function: Callable[..., Any], share: float, which: int) -> Callable[..., Any]:
        def count(*tensors: Any, **options: Any) -> Any:
            tensor = tensors[which]
            total[0] += share * tensor.numel() * tensor.element_size()
            return function(*tensors, **options)

        return count

    with patch.context() as patched:
        patched.setattr(dist, "all_reduce", counted(dist.all_reduce, 1.0, 0))
        patched.setattr(tensor_split, "_all_gather", counted(tensor_split._all_gather, 0.5, 0))
        patched.setattr(tensor_split, "_reduce_scatter", counted(tensor_split._reduce_scatter, 0.5, 1))
        with strategy.micro(last=False):
            _loss(model, _ids()).backward()
    return total[0]


def _gathers(ranks: Gang, passes: int, patch: pytest.MonkeyPatch) -> int:
    """How often two layers with one input gather it, in a forward and the passes of a backward."""
    split = TensorSplit(TOKENS, ranks.size, ranks.rank, ranks.device_group)
    part = torch.ones(2, TOKENS // 2, 16, requires_grad=True)
    weights = [torch.ones(8, 16, requires_grad=True) for _ in range(2)]
    calls: list[None] = []
    gather = tensor_split._all_gather
    with patch.context() as patched:
        patched.setattr(
            tensor_split,
            "_all_gather",
            lambda *args, **options: [calls.append(None), gather(*args, **options)],
        )
        joined = Joined(part, split)
        views = [weight.view(8, 16) for weight in weights]
        loss = sum(joined.linear(view, None).sum() for view in views)
        if passes == 1:
            loss.backward()
        else:
            [part.grad] = torch.autograd.grad(loss, part, retain_graph=True)
            assert len(calls) == 1
            for weight, found in zip(weights, torch.autograd.grad(loss, views), strict=True):
                weight.grad = found
    assert torch.equal(part.grad, torch.full_like(part, 2 * 8 * ranks.size))
    assert all(torch.equal(weight.grad, torch.full_like(weight, 2.0 * TOKENS)) for weight in weights)
    return len(calls)


def _costs(ranks: Gang) -> None:
    patch = pytest.MonkeyPatch()
    models = {positions: _model("plain") for positions in (False, True)}
    strategies = {positions: _divided(model, ranks, positions) for positions, model in models.items()}
    sent = {positions: _sent(models[positions], strategies[positions], patch) for positions in models}
    states = 2 * TOKENS * _SIZES["hidden_size"] * 8
    # Two sums in the forward and two in the backward of each layer, those of the embedding, and of the head's backward.
    assert sent[False] == (4 * _SIZES["num_hidden_layers"] + 2) * states
    # A gather ends the last block, and another one ends the backward of the first: half of the states each. So do the
    # two of each layer whose inputs are gathered again in its backward.
    assert sent[True] == sent[False] + (1 + _SIZES["num_hidden_layers"]) * states
    for passes in (1, 2):  # of all gradients at once, and as pipelines split them
        assert _gathers(ranks.over("tensor"), passes, patch) == 1 + 1
    kept = {positions: _kept(model) for positions, model in models.items()}
    assert [2 * n for n in kept[True]] == list(kept[False])
    assert 0 < kept[False][0] < kept[False][1], "norms, and inputs of divided layers"


def _drops(ranks: Gang) -> None:
    """Gradients belong to the masks of the forward: they predict by how much the loss changes with the weights."""
    for name in ("dropout", "dropout of layers that are not divided"):
        for recomputed in (False, True):
            model = _model(name)
            strategy = _divided(model, ranks)
            if recomputed:
                apply_recompute(model)
            masks: list[Tensor] = []
            handle = model.transformer.h[0].mlp.register_forward_hook(
                lambda _, __, output, masks=masks: masks.append(output == 0)
            )
            torch.manual_seed(3)
            with strategy.micro(last=True):
                _loss(model, _ids()).backward()
            handle.remove()
            found = ranks.over("tensor").gather_objects(masks[0].int().tolist())
            if name == "dropout":
                assert found[0] != found[1], "each part has random numbers of its own"
            generator = torch.Generator().manual_seed(4)
            step, slope = 1e-6, 0.0
            directions = []
            for parameter in model.parameters():
                direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                slope += float((whole(parameter.grad) * direction).sum())
                directions.append(direction)
            losses = []
            for sign in (1, -1):
                moved = copy.deepcopy(_model(name))
                with torch.no_grad():
                    for parameter, direction in zip(moved.parameters(), directions, strict=True):
                        parameter += sign * step * direction
                _divided(moved, ranks)
                torch.manual_seed(3)
                losses.append(float(_loss(moved, _ids())))
            assert abs((losses[0] - losses[1]) / (2 * step) - slope) < 1e-6 * max(1, abs(slope)), (
                name,
                recomputed,
            )


def _refused(ranks: Gang) -> None:
    def message(model: nn.Module) -> str:
        with pytest.raises(ConfigError) as caught:
            _divided(model, ranks)
        return str(caught.value)

    config = transformers.T5Config(vocab_size=24, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4)
    assert "an encoder" in message(transformers.T5ForConditionalGeneration(config))
    mixed = _model("plain")
    first = mixed.model.layers[0]
    own = type(first).forward

    class Summing(type(first)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return own(self, hidden_states.cumsum(1), *args, **kwargs)

    first.__class__ = Summing
    assert "its logits differ" in message(mixed)
    endless = _model("plain")
    endless.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0].log(), *args[1:]))
    assert "its logits differ by nan" in message(endless)
    failing, fails = _model("plain"), iter((False, ranks.world.rank > 0))
    failing.register_forward_hook(lambda *_: {}["of one rank"] if next(fails) else None)
    assert "KeyError: 'of one rank'" in message(failing)
    whole_model = _model("plain")
    _divided(whole_model, ranks, positions=False).release()
    assert "stays so" in message(whole_model)


def main(name: str) -> None:
    all_ranks = join(world_from_environment(), torch.device("cpu"), mesh=Mesh(tensor=2))
    {"equal": _equal, "costs": _costs, "drops": _drops, "refused": _refused}[name](all_ranks.over("loss"))
    dist.barrier()
    leave()
