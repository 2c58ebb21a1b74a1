"""Ways to begin an adapter, adapters of experts and of whole modules: resumed to the bit, read by peft, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.trainers import trainer_of

from windlass.core.errors import ConfigError
from windlass.finetuning.peft_adapters import add_adapter

peft = pytest.importorskip("peft")


def _experts() -> Any:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**sizes, **experts, num_key_value_heads=2, num_experts_per_tok=2, pad_token_id=0)
    )


def _base(kind: str) -> Any:
    return _experts() if kind == "experts" else small.model(tie_word_embeddings=kind == "tokens")


KINDS: dict[str, dict[str, Any]] = {
    "gaussian": {"init_lora_weights": "gaussian"},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "loraplus": {},
    "whole modules": {"modules_to_save": ["lm_head"]},
    # One weight under two names: the model's head is tied to its embedding.
    "tokens": {"trainable_token_indices": [5, 6]},
    "experts": {"target_modules": "all-linear"},
}


def _trainer(folder: Path, kind: str) -> Any:
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **KINDS[kind]}
    torch.manual_seed(3)
    return trainer_of(
        folder,
        small.texts(12),
        model=_base(kind),
        peft_config=peft.LoraConfig(**options),
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        learning_rate=1e-2,
        loraplus_lr_ratio=4 if kind == "loraplus" else None,
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
    base = _base(kind)
    again = peft.PeftModel.from_pretrained(base, str(tmp_path / "checkpoint-4")).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
    merged = whole.model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"init_lora_weights": "pissa_niter_2"}, "draws the base that is left at random"),
        ({"init_lora_weights": "eva", "eva_config": peft.EvaConfig()}, "initialize_lora_eva_weights"),
    ],
)
def test_a_beginning_that_would_be_lost_is_refused(options: Any, fix: str) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], **options)
    with pytest.raises(ConfigError, match=fix):
        add_adapter(small.model(), config, [])


def test_whole_modules_that_match_nothing_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    def config(*names: str) -> Any:
        return peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=list(names))

    with pytest.raises(ConfigError, match=r"peft_config.modules_to_save=\['score'\]: matches no module"):
        add_adapter(small.model(), config("score"), [])
    add_adapter(small.model(), config("head", "score"), [])
    assert "peft_config.modules_to_save: no module of LlamaForCausalLM is named 'score'" in caplog.text


def _from_batches(kind: str) -> Any:
    """A model of peft, made and begun by the script."""
    torch.manual_seed(3)
    config = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    if kind == "eva":
        eva = peft.LoraConfig(**config, init_lora_weights="eva", eva_config=peft.EvaConfig())
        model = peft.get_peft_model(small.model(), eva)
        ids = torch.arange(3, 15)[None]
        peft.initialize_lora_eva_weights(model, [{"input_ids": ids + shift} for shift in range(4)])
        return model
    model = peft.get_peft_model(small.model(), peft.LoraConfig(**config))
    model.add_adapter("second", peft.LoraConfig(**{**config, "target_modules": ["v_proj"]}))
    model.base_model.set_adapter("second" if kind == "one of two" else ["default", "second"])
    return model


@pytest.mark.parametrize("kind", ["eva", "one of two", "both of two"])
def test_a_model_of_peft_resumes_to_the_bit(kind: str, tmp_path: Path) -> None:
    def trainer() -> Any:
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
        return trainer_of(tmp_path, small.texts(12), model=_from_batches(kind), **options)

    begun = {name: weight.detach().clone() for name, weight in _from_batches(kind).named_parameters()}
    whole = trainer()
    whole.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found = dict(resumed.model.named_parameters())
    changed = {name for name, weight in found.items() if not torch.equal(weight, begun[name])}
    assert {name.split(".")[-2] for name in changed} == {
        "eva": {"default"}, "one of two": {"second"}, "both of two": {"default", "second"},
    }[kind]  # fmt: skip
    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight, found[name]), name
    if kind == "one of two":
        again = _from_batches(kind)
        again.load_adapter(str(tmp_path / "checkpoint-4"), "saved")
        again.base_model.set_adapter("saved")
        ids = torch.arange(3, 15)[None]
        torch.testing.assert_close(
            again.eval()(input_ids=ids).logits, whole.model.eval()(input_ids=ids).logits
        )


def test_loraplus_trains_b_faster_and_resumes_to_the_bit(tmp_path: Path) -> None:
    """The field gives the groups and the weights of peft's optimizer."""
    from peft.optimizers import create_loraplus_optimizer

    def trainer(folder: str, by_field: bool = True) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(small.model(), config)
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
        if by_field:
            options["loraplus_lr_ratio"] = 16
        else:
            options["optimizers"] = (
                create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16), None
            )  # fmt: skip
        return trainer_of(tmp_path / folder, small.texts(12), model=model, **options)

    whole, by_hand = trainer("run"), trainer("by_hand", by_field=False)
    whole.train()
    by_hand.train()
    resumed = trainer("run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    rates = {group["initial_lr"] for group in resumed.optimizer.param_groups if group["params"]}
    assert rates == {1e-3, 16e-3}
    for name, weight in _trained(whole).items():
        assert torch.equal(weight, _trained(resumed)[name]), name
        torch.testing.assert_close(weight, _trained(by_hand)[name])


def test_loraplus_without_lora_is_refused(tmp_path: Path) -> None:
    for model in (small.model(), peft.get_peft_model(small.model(), peft.IA3Config(task_type="CAUSAL_LM"))):
        with pytest.raises(ConfigError, match=r"loraplus_lr_ratio=16.*none is trained"):
            trainer_of(tmp_path, small.texts(12), model=model, loraplus_lr_ratio=16)
