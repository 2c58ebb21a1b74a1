"""The reference of a trainer of preferences: the copy of an adapter, no dropout, and which reference is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.preferences import moved, pairs, settings
from torch import Tensor, nn

from windlass.core.errors import CheckpointError, ConfigError
from windlass.finetuning.dpo_trainer import DPOTrainer
from windlass.finetuning.frozen_reference import REFERENCE_ADAPTER, keep_adapter, without_dropout
from windlass.finetuning.reference_trainer import ReferenceState

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

TARGETS = ["q_proj", "v_proj"]
# Most keep their weights by the name of the adapter, which is then the last part of the parameters' names.
KINDS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS),
    "lora of embeddings": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
    "lora of a parameter": lambda: peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["q_proj.weight"]
    ),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "tokens": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, trainable_token_indices=[7, 8]),
    "whole head": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"]),
    # Their beginnings change the base.
    "pissa": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights="pissa"),
    "olora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights="olora"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def falcon(dropout: float) -> Any:
    """A model that reads its dropout from its configuration."""
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    return FalconForCausalLM(
        FalconConfig(
            vocab_size=36, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, hidden_dropout=dropout,
            pad_token_id=0, eos_token_id=1, bos_token_id=1,
        )
    )  # fmt: skip


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.tensor([[7, 8, 9, 10]])).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_adapter_is_the_trained_one_as_it_was(kind: str) -> None:
    model = peft.get_peft_model(small.model(), KINDS[kind]())
    draw = torch.Generator().manual_seed(1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    before = logits(model)
    keep_adapter(model)
    keep_adapter(model)  # which changes nothing
    assert torch.equal(logits(model), before)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(trained)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.zero_()
    assert not torch.equal(logits(model), before)
    model.set_adapter(REFERENCE_ADAPTER)
    assert torch.equal(logits(model), before)


def test_dropout_of_every_kind_is_off() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    # OPT has no layers of dropout, but shares that its modules read.
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=36, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
            word_embed_proj_dim=16, dropout=0.5, attention_dropout=0.5, activation_dropout=0.5, layerdrop=0.5,
        )
    )  # fmt: skip
    model.add_module("planes", nn.Sequential(nn.Dropout2d(0.5), nn.MultiheadAttention(4, 1, dropout=0.5)))
    without_dropout(model)
    expected, x = logits(model), torch.ones(1, 4, 4)
    model.train()
    assert torch.equal(model(input_ids=torch.tensor([[7, 8, 9, 10]])).logits, expected)
    assert torch.equal(model.planes[0](x), x)
    assert torch.equal(model.planes[1](x, x, x)[0], model.planes[1].eval()(x, x, x)[0])


def test_dropout_of_adapters_is_off() -> None:
    config = peft.LoHaConfig(
        r=2, target_modules=["q_proj"], rank_dropout=0.5, module_dropout=0.5, init_weights=False
    )
    model = peft.get_peft_model(small.model(), config)
    without_dropout(model)
    expected = logits(model)
    model.train()
    assert torch.equal(model(input_ids=torch.tensor([[7, 8, 9, 10]])).logits, expected)


def test_dropout_that_cannot_be_switched_off_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_threshold = 0.25

    with pytest.raises(ConfigError, match=r"cannot switch off Own.drop_threshold=0.25: set it to 0"):
        without_dropout(nn.Sequential(nn.Linear(2, 2), Own()))
    with pytest.raises(ConfigError, match=r"cannot switch off config.hidden_dropout=0.5: set it to 0"):
        without_dropout(falcon(0.5))
    without_dropout(falcon(0.0))


def test_a_forward_that_cannot_be_looked_into_may_read_any_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may put any callable in the place of a model's forward."""
    model = falcon(0.5)
    for kind in {type(module) for module in model.modules() if hasattr(module, "config")}:
        monkeypatch.setattr(kind, "forward", functools.partial(kind.forward))
    with pytest.raises(ConfigError, match=r"cannot switch off .*config.hidden_dropout=0.5"):
        without_dropout(model)


def test_a_reference_without_the_adapter_draws_nothing(tmp_path: Path) -> None:
    """Falcon reads its dropout from its configuration, where no share of a module can be set to 0."""
    trainer = DPOTrainer(
        falcon(0.5), None, settings(tmp_path, disable_dropout=False), None, pairs(4), None, small.tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["query_key_value"]),
    )  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[at] for at in range(2)])
    trainer.model.train()
    first, second = (trainer.compute_ref_log_probs(trainer.model, batch)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(module.training for module in trainer.model.modules())


@pytest.mark.parametrize("other", ["adapter", "smaller"])
def test_a_reference_that_cannot_follow_is_refused_before_training(tmp_path: Path, other: str) -> None:
    adapter = peft.LoraConfig(r=2, target_modules=TARGETS) if other == "adapter" else None
    reference = moved(small.model() if other == "adapter" else small.model(num_hidden_layers=1))
    with pytest.raises(ConfigError, match=r"sync_ref_model.*the parameters of the model"):
        DPOTrainer(
            small.model(), reference, settings(tmp_path, sync_ref_model=True), None, pairs(4), None,
            small.tokenizer(), peft_config=adapter,
        )  # fmt: skip


def test_a_moved_reference_of_other_numbers_of_ranks_is_put_together() -> None:
    saved, model = nn.Linear(2, 3), nn.Linear(2, 3)
    # As two ranks hold them: rows, of which the last rank has fewer.
    halves = [
        {str(at): p.detach()[rows] for at, p in enumerate(saved.parameters())}
        for rows in (slice(2), slice(2, 3))
    ]
    ReferenceState(model).adopt(halves)
    assert all(map(torch.equal, model.parameters(), saved.parameters()))
    with pytest.raises(CheckpointError, match="saved by 1 ranks in a layout"):
        ReferenceState(model).adopt(halves[:1])
