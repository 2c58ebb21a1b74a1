"""Ways to begin an adapter, adapters of experts and of whole modules: resumed to the bit, read by peft, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.trainers import trainer_of

peft = pytest.importorskip("peft")


def _experts() -> Any:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**sizes, **experts, num_key_value_heads=2, num_experts_per_tok=2, pad_token_id=0)
    )


KINDS: dict[str, dict[str, Any]] = {
    "gaussian": {"init_lora_weights": "gaussian"},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "rslora": {"use_rslora": True},
    "whole modules": {"modules_to_save": ["lm_head"]},
    "experts": {"target_modules": "all-linear"},
}


def _trainer(folder: Path, kind: str) -> Any:
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **KINDS[kind]}
    torch.manual_seed(3)
    return trainer_of(
        folder,
        small.texts(12),
        model=_experts() if kind == "experts" else small.model(),
        peft_config=peft.LoraConfig(**options),
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        learning_rate=1e-2,
    )


def _trained(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: weight.detach() for name, weight in trainer.model.named_parameters() if weight.requires_grad
    }


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_to_the_bit_and_merges(kind: str, tmp_path: Path) -> None:
    whole = _trainer(tmp_path, kind)
    whole.train()
    resumed = _trainer(tmp_path, kind)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected, found = _trained(whole), _trained(resumed)
    assert expected.keys() == found.keys()
    assert any("experts" in name for name in found) == (kind == "experts")
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name
    ids = torch.arange(3, 15)[None]
    whole.model.eval()
    logits = whole.model(input_ids=ids).logits
    base = _experts() if kind == "experts" else small.model()
    again = peft.PeftModel.from_pretrained(base, str(tmp_path / "checkpoint-4")).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
    merged = whole.model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
