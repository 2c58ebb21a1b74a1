"""A loss on a head that is divided over the vocabulary is that of a whole one, and no rank makes whole logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tests.dist.launch import on_ranks
from torch import Tensor, nn

from windlass.config.plan import DistPlan, ShardPlan
from windlass.core.mesh import Mesh
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.dist.sharded import whole
from windlass.transforms.fsdp import FullyShardedModel
from windlass.transforms.lean_loss import lean_causal_lm_loss, lean_log_probabilities
from windlass.transforms.linear_cross_entropy import LossOptions, linear_cross_entropy
from windlass.transforms.linear_log_probabilities import linear_log_probabilities
from windlass.transforms.strategy import Strategy
from windlass.transforms.tensor_parallel import TensorParallel
from windlass.transforms.tensor_split import TensorSplit

pytest.importorskip("transformers")


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_of_a_tensor_gang_make_the_loss_of_whole_logits(ranks: int) -> None:
    on_ranks(ranks, main)


# --- what each rank runs ----------------------------------------------------------------------------------------------


_SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LlamaConfig", _SIZES),
    "tied": ("LlamaConfig", _SIZES | {"tie_word_embeddings": True}),
    # A factor, and an embedding of a class of its own that is scaled.
    "scaled": ("GraniteConfig", _SIZES | {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "soft-capped": ("Gemma2Config", _SIZES | {"head_dim": 4, "final_logit_softcapping": 2.0}),
}
_OPTIONS = {
    "plain": LossOptions(),
    "smoothed": LossOptions(label_smoothing=0.1, z_loss=1e-2),
    "weighted": LossOptions(
        label_smoothing=0.2, class_weights=torch.linspace(0.5, 2, 23, dtype=torch.float64)
    ),
    "dynamic": LossOptions(dynamic=True),
}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    kind, options = _CONFIGS[name]
    config = getattr(transformers, kind)(**options)
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.float64).train()


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(1))  # some are padding
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def _never(split: TensorSplit, part: Tensor) -> Tensor:
    raise AssertionError(f"rank {split.rank} made whole logits")


def _check_gradients(model: nn.Module, plain: nn.Module, limit: float, what: Any) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, (what, name)
        found, wanted = whole(parameter.grad), expected[name].grad
        assert wanted is not None
        assert (found - wanted).abs().max() <= limit, (what, name, (found - wanted).abs().max())
    model.zero_grad()
    plain.zero_grad()


def _check(name: str, strategy: Strategy, model: Any, plain: Any, patch: pytest.MonkeyPatch) -> None:
    batch = _batch()
    limit = 1e-6 if name == "soft-capped" else 1e-12  # its norms are computed in single precision
    lean_causal_lm_loss(model, batch)  # measures, by whole logits that are known
    with patch.context() as patched:
        patched.setattr(TensorSplit, "whole", _never)
        for kind, options in _OPTIONS.items():
            expected, figures = lean_causal_lm_loss(plain, batch, options=options)
            with strategy.micro(last=True):
                loss, found = lean_causal_lm_loss(model, batch, options=options)
                loss.backward()
            expected.backward()
            for one, other in zip((loss, *_figures(found)), (expected, *_figures(figures)), strict=True):
                assert (one - other).abs() <= limit, (name, kind, one, other)
            _check_gradients(model, plain, limit, (name, kind))
        wanted, _ = lean_log_probabilities(plain, batch)
        with strategy.micro(last=True):
            got, _ = lean_log_probabilities(model, batch)
            (got.log_probabilities**2).sum().backward()
        (wanted.log_probabilities**2).sum().backward()
        for one, other in zip(got, wanted, strict=True):
            assert (one - other).abs().max() <= limit, (name, "log-probabilities")
        _check_gradients(model, plain, limit, (name, "log-probabilities"))
        # Its own loss, which it computes in single precision.
        with strategy.micro(last=True):
            outputs = model(**batch, use_cache=False)
            outputs.loss.backward()
    expected = plain(**batch, use_cache=False)
    expected.loss.backward()
    assert (outputs.loss - expected.loss).abs() < 1e-5, name
    _check_gradients(model, plain, 1e-5, (name, "own"))
    assert (outputs.logits - expected.logits).abs().max() <= limit
    hidden = model(**batch, output_hidden_states=True)
    assert len(hidden.hidden_states) == 2
    assert hidden.logits.shape[-1] == 23
    with strategy.gathered():
        assert (model(batch["input_ids"]).logits - expected.logits).abs().max() <= limit
    assert (model(batch["input_ids"]).logits - expected.logits).abs().max() <= limit, "divided again"


def _check_ties(ranks: Gang) -> None:
    """Of equal logits the first one is the prediction, on whichever rank it is."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 2, generator=generator, dtype=torch.float64).round() for n in (200, 23))
    targets = torch.randint(0, 23, (200,), generator=generator)
    split = TensorSplit(23, ranks.size, ranks.rank, ranks.device_group)
    mine = weight[split.mine.start : split.mine.stop]
    expected = (hidden @ weight.T).argmax(1) == targets
    assert linear_cross_entropy(hidden, mine, None, targets, split=split).correct == expected.sum() > 0
    assert torch.equal(
        linear_log_probabilities(hidden, mine, None, targets, split=split).correct, expected.double()
    )


def _figures(found: Any) -> tuple[Tensor, ...]:
    return found.loss, found.targets, found.entropy, found.correct


def _strategy(model: nn.Module, loss_ranks: Gang) -> Strategy:
    if loss_ranks.mesh.size() == loss_ranks.mesh.tensor:
        return TensorParallel(model, loss_ranks, torch.device("cpu"))
    plan = DistPlan(strategy="fsdp", shard=ShardPlan(), tensor=2)
    return FullyShardedModel(model, plan, loss_ranks, torch.device("cpu"))


def main() -> None:
    world = world_from_environment()
    sizes = {2: Mesh(tensor=2), 4: Mesh(shard=2, tensor=2)}
    all_ranks = join(world, torch.device("cpu"), mesh=sizes[world.size])
    patch = pytest.MonkeyPatch()
    for name in _CONFIGS:
        plain = _model(name)
        model = copy.deepcopy(plain)
        strategy = _strategy(model, all_ranks.over("loss"))
        assert len(model.get_output_embeddings().split.mine) == 12 - all_ranks.over("tensor").rank
        _check(name, strategy, model, plain, patch)
    _check_ties(all_ranks.over("tensor"))
    dist.barrier()
    leave()
