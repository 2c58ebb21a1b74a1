"""Adapters on plain and on quantized models: what is trained, what is saved, and what reads it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.finetuning import few_bits_ranks, small
from tests.finetuning.test_sft_trainer import trainer_of
from transformers import AutoConfig, AutoModelForCausalLM

from windlass.core import logs
from windlass.core.errors import ConfigError
from windlass.finetuning.peft_adapters import (
    add_adapter,
    describe_trained,
    is_peft_model,
    let_gradients_in,
    prepare_quantized,
)
from windlass.transforms.few_bits import keep_trainable

peft = pytest.importorskip("peft")


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    )


def ids() -> torch.Tensor:
    return torch.arange(6, 18)[None]


def mixture(kind: str, **changes: Any) -> Any:
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts_per_tok": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes, **changes)
    return AutoModelForCausalLM.from_config(config)


# Kind -> arguments of its configuration, and the parameters that "all-linear" does not reach.
_EVERY, _SECOND = "model.layers.*.", {"attn_layer_offset": 1, "attn_layer_period": 2}
MIXTURES: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": ({"num_local_experts": 4, "head_dim": 8}, "mlp"),
    "granitemoe": ({"num_local_experts": 4}, "block_sparse_moe"),
    "jamba": ({"num_experts": 4, "mamba_d_state": 4, **_SECOND}, "feed_forward"),
    "qwen2_moe": (
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}, "mlp"
    ),
    "mixtral": ({"num_local_experts": 4}, ""),
    "llama": ({}, ""),
}  # fmt: skip


def _adapted_experts(model: Any) -> int:
    return sum("experts" in name for name, weight in model.named_parameters() if weight.requires_grad)


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_linear_layer_is_that_of_the_experts_too(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)
    changes, room = MIXTURES[kind]
    model: Any = add_adapter(mixture(kind, **changes), lora(target_modules="all-linear"), [])
    assert "frozen" not in caplog.text
    assert (_adapted_experts(model) >= 4) == (kind != "llama")
    if not room:
        return
    for name, weight in model.named_parameters():
        if "lora_B" in name and "experts" in name:
            torch.nn.init.normal_(weight)
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    assert all(w.grad is not None for n, w in model.named_parameters() if w.requires_grad and "experts" in n)
    model.save_pretrained(tmp_path)
    base = mixture(kind, **changes)
    base.load_state_dict(model.unload().state_dict())
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(again(input_ids=ids(), labels=ids()).loss, loss)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids(), labels=ids()).loss, loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout=0.0"),
        ({"use_dora": True}, "use_dora=False"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=True"),
    ],
)
def test_experts_that_stay_frozen_are_named_with_the_way_to_train_them(
    change: dict[str, Any], needed: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)
    changes, room = MIXTURES["qwen2_moe"]
    targets = [f"{room}.experts.down_proj", f"{room}.experts.gate_up_proj"]
    model = add_adapter(mixture("qwen2_moe", **changes), lora(target_modules="all-linear", **change), [])
    assert f"{_EVERY}{targets[0]}, {_EVERY}{targets[1]} are no linear layers and stay frozen" in caplog.text
    assert needed in caplog.text
    assert f"target_parameters={targets!r}" in caplog.text
    assert not sum(".mlp.experts." in n for n, weight in model.named_parameters() if weight.requires_grad)


def test_names_of_experts_are_targets(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)
    changes, _ = MIXTURES["qwen2_moe"]
    config = lora(target_modules=["q_proj", "experts.gate_up_proj"])
    model = add_adapter(mixture("qwen2_moe", **changes), config, [])
    assert _adapted_experts(model) == 4, "two matrices in each of two layers"
    assert config.target_parameters == ["experts.gate_up_proj"]
    unknown = lora(target_modules=["q_proj"], target_parameters=["experts.gate_up"])
    with pytest.raises(
        ConfigError, match=r"target_parameters=\['experts\.gate_up'\]: matches no parameter of Qwen2"
    ):
        add_adapter(mixture("qwen2_moe", **changes), unknown, [])
    unknown = lora(target_modules=["q_proj"], target_parameters=["experts.gate_up", "experts.gate_up_proj"])
    add_adapter(mixture("qwen2_moe", **changes), unknown, [])
    assert (
        "target_parameters: no parameter of Qwen2MoeForCausalLM is named 'experts.gate_up'; the"
        in caplog.text
    )
    refused = lora(target_modules=["q_proj", "experts.gate_up_proj"], lora_dropout=0.1)
    with pytest.raises(ConfigError, match=r"lora_dropout=0\.0"):
        add_adapter(mixture("qwen2_moe", **changes), refused, [])


KINDS = {
    "lora": lambda: lora(),
    "dora": lambda: lora(use_dora=True),
    "rslora": lambda: lora(use_rslora=True),
    "all-linear": lambda: lora(target_modules="all-linear"),
    "head": lambda: lora(target_modules=["q_proj", "lm_head"]),
    "embeddings": lambda: lora(modules_to_save=["embed_tokens"]),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_and_saved_is_read_by_peft(tmp_path: Path, kind: str) -> None:
    trainer = trainer_of(tmp_path, small.texts(), peft_config=KINDS[kind](), max_steps=6)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, before[name]) != weight.requires_grad, name
    trainer.save_model()
    assert (tmp_path / "adapter_config.json").is_file()
    read = peft.PeftModel.from_pretrained(small.model(), str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(read(ids()).logits, trainer.model.eval()(ids()).logits)


PROMPTS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_learnt_prompts_are_trained_saved_and_resumed(tmp_path: Path, kind: str) -> None:
    def trainer(name: str, **changes: Any) -> Any:
        return trainer_of(
            tmp_path / name, small.texts(), peft_config=PROMPTS[kind](), save_strategy="steps", **changes
        )

    whole = trainer("whole")
    (before,) = (p.clone() for p in whole.model.parameters() if p.requires_grad)
    whole.train()
    (after,) = (p for p in whole.model.parameters() if p.requires_grad)
    assert not torch.equal(before, after)
    read = peft.PeftModel.from_pretrained(small.model(), str(tmp_path / "whole" / "checkpoint-3")).eval()
    with torch.no_grad():
        assert torch.equal(read(ids()).logits, whole.model.eval()(ids()).logits)
    trainer("cut", save_steps=2).train()
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert torch.equal(after, next(p for p in resumed.model.parameters() if p.requires_grad))


def test_prompts_of_an_encoder_with_layers_are_saved_with_all_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs.warn_once.cache_clear()
    prompts = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    trainer = trainer_of(tmp_path, small.texts(), peft_config=prompts, max_steps=1)
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "model.safetensors").is_file()
    # With the configuration of the base beside them, `from_pretrained` would draw new weights.
    assert not (tmp_path / "config.json").exists()
    assert "trainer.model.save_pretrained(FOLDER)" in caplog.text
    trainer.model.save_pretrained(tmp_path / "adapter")
    read = peft.PeftModel.from_pretrained(small.model(), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        assert torch.equal(read(ids()).logits, trainer.model.eval()(ids()).logits)


def test_tokens_of_a_chat_template_are_in_the_saved_adapter(tmp_path: Path) -> None:
    """The rows of new tokens, in the embeddings and in the head, replace those of a base that was resized again."""
    source = small.tokenizer()
    source.add_tokens(["<|tool|>", "<|end|>"])
    source.eos_token = "<|end|>"
    source.chat_template = small.CHAT.replace("<eos>", "<|end|>")
    source.save_pretrained(tmp_path / "source")
    trainer = trainer_of(
        tmp_path / "run",
        small.chats(),
        peft_config=lora(),
        chat_template_path=str(tmp_path / "source"),
        max_steps=3,
    )
    trainer.train()
    trainer.save_model()
    base = small.model()
    base.resize_token_embeddings(trainer.model.get_input_embeddings().weight.shape[0])
    read = peft.PeftModel.from_pretrained(base, str(tmp_path / "run")).eval()
    new = trainer.processing_class.convert_tokens_to_ids(["<|tool|>", "<|end|>"])
    assert min(new) >= 36
    with torch.no_grad():
        prompt = torch.tensor([[6, *new, 7, 8]])
        assert torch.equal(read(prompt).logits, trainer.model.eval()(prompt).logits)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"chat_template_path=.*is not UTF-8"):
        trainer_of(tmp_path / "run", small.chats(), chat_template_path=str(tmp_path / "chat.jinja"))


def test_an_adapter_is_drawn_from_the_seed(tmp_path: Path) -> None:
    weights = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        trainer = trainer_of(tmp_path, small.texts(), peft_config=lora(), seed=seed)
        weights.append(next(w for n, w in trainer.model.named_parameters() if "lora_A" in n))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_recomputation_reaches_the_adapter(tmp_path: Path) -> None:
    for reentrant in (False, True):
        trainer = trainer_of(
            tmp_path / str(reentrant), small.texts(), peft_config=lora(), gradient_checkpointing=True, max_steps=2,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )  # fmt: skip
        trainer.train()
        moved = [w for n, w in trainer.model.named_parameters() if "lora_B" in n]
        assert all(w.abs().sum() > 0 for w in moved)


def test_the_trained_share_is_reported() -> None:
    model = peft.get_peft_model(small.model(), lora())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    assert describe_trained(model) == f"training {trained:,} of {total:,} parameters ({trained / total:.2%})"


def test_targets_that_match_nothing_are_refused_with_examples(tmp_path: Path) -> None:
    for targets in (["wq", "wv"], "wq", r".*\.wq"):
        with pytest.raises(
            ConfigError, match=r"peft_config.target_modules=.*LlamaForCausalLM.*q_proj.*all-linear"
        ):
            trainer_of(tmp_path, small.texts(), peft_config=lora(target_modules=targets))


def test_a_wrong_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"must be a `peft\.PeftConfig` instance"):
        trainer_of(tmp_path, small.texts(), peft_config={"r": 2})
    with pytest.raises(ValueError, match="merge and unload"):
        trainer_of(
            tmp_path, small.texts(), model=peft.get_peft_model(small.model(), lora()), peft_config=lora()
        )


def test_ranks_that_change_are_not_sharded_and_change_by_a_callback_alone(
    tmp_path: Path, caplog: Any
) -> None:
    adapter = peft.AdaLoraConfig(total_step=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    caplog.set_level("WARNING", logger="windlass")
    trainer = trainer_of(tmp_path, small.texts(), peft_config=adapter, fsdp="full_shard")
    assert "ranks stay at init_r until a callback" in caplog.text
    with pytest.raises(ConfigError, match="peft_config='AdaLoraConfig': reads all of its weights"):
        trainer.train()


def test_a_peft_model_is_trained_as_it_is(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, small.texts(), model=peft.get_peft_model(small.model(), lora()), packing=True
    )
    assert is_peft_model(trainer.model)
    assert {"windlass", "sft"} <= set(trainer.model.model_tags)
    trainer.train()


def test_gradients_are_let_in_once() -> None:
    model = small.model()
    let_gradients_in(model)
    let_gradients_in(model)
    assert len(model.get_input_embeddings()._forward_hooks) == 1


def test_a_quantized_base_is_prepared_once() -> None:
    model = small.model().to(torch.bfloat16)
    for _ in range(2):
        prepare_quantized(model)
    kinds = {name.rpartition(".")[0].rpartition(".")[2]: p.dtype for name, p in model.named_parameters()}
    assert kinds["norm"] == kinds["input_layernorm"] == torch.float32
    assert kinds["q_proj"] == kinds["embed_tokens"] == torch.bfloat16
    assert not any(p.requires_grad for p in model.parameters())


# --- quantized ------------------------------------------------------------------------------------------------


def quantized(folder: Path, **changes: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    name = small.saved(folder, hidden_size=64, intermediate_size=64)
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return name, BitsAndBytesConfig(**{**options, **changes}), AutoModelForCausalLM


def test_four_bits_train_on_a_cpu(tmp_path: Path) -> None:
    from windlass import SFTTrainer

    name, four_bits, auto = quantized(tmp_path / "base")
    trainer = SFTTrainer(
        name, small.arguments(tmp_path / "run", gradient_checkpointing=True, max_steps=4, save_strategy="steps"),
        train_dataset=small.table(small.texts()), quantization_config=four_bits, peft_config=lora(),
    )  # fmt: skip
    assert type(trainer.model.get_base_model().model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    trainer.train()
    norms = [r["grad_norm"] for r in trainer.state.log_history if "grad_norm" in r]
    assert len(norms) == 4
    assert min(norms) > 0
    read = peft.PeftModel.from_pretrained(
        auto.from_pretrained(name, quantization_config=four_bits, dtype=torch.float32),
        str(tmp_path / "run" / "checkpoint-4"),
    ).eval()
    keep_trainable(read)  # the same arithmetic as the trained model
    with torch.no_grad():
        assert torch.allclose(read(ids()).logits, trainer.model.eval()(ids()).logits, atol=1e-6)


def test_few_bits_that_are_stored_as_integers_are_not_sharded(tmp_path: Path) -> None:
    from windlass import SFTTrainer

    name, four_bits, _ = quantized(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"bnb_4bit_quant_storage=torch\.float32"):
        SFTTrainer(
            name, small.arguments(tmp_path, fsdp="full_shard"), train_dataset=small.table(small.texts()),
            quantization_config=four_bits, peft_config=lora(),
        )  # fmt: skip


@pytest.mark.dist
def test_a_base_of_four_bits_is_sharded(tmp_path: Path) -> None:
    """Two ranks with half of the packed weights each equal one process, and resume to the bit."""
    pytest.importorskip("bitsandbytes")
    name = small.saved(tmp_path / "base", hidden_size=64, intermediate_size=64)
    alone, first, second = [
        found for ranks in (1, 2) for found in on_ranks(ranks, few_bits_ranks.main, name, tmp_path)
    ]
    assert (first["sent"].pop("empty"), second["sent"].pop("empty")) == (0, 4), (
        "the first process alone has them"
    )
    assert first == second
    assert first["whole"]["sharded"]
    for key in ("adapter", "losses"):
        assert first["sent"][key] == first["whole"][key], "the same bits"
    assert first["whole"]["adapter"] == first["resumed"]["adapter"], "the same bits"
    assert len(first["whole"]["losses"]) == 4
    assert first["whole"]["losses"] == pytest.approx(alone["whole"]["losses"], rel=1e-5)
    for key, values in alone["whole"]["adapter"].items():
        assert first["whole"]["adapter"][key] == pytest.approx(values, rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("bits", [8, 4])
def test_a_base_of_torchao_is_tuned_saved_and_resumed(tmp_path: Path, bits: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    dtypes: Any = torch
    form = (
        quantization.Int8WeightOnlyConfig()
        if bits == 8
        else quantization.IntxWeightOnlyConfig(dtypes.int4, PerGroup(32))
    )

    from windlass import SFTTrainer

    name = small.saved(tmp_path / "base", hidden_size=64, intermediate_size=64)

    def trainer(folder: str, **changes: Any) -> SFTTrainer:
        return SFTTrainer(
            name, small.arguments(tmp_path / folder, save_strategy="steps", **changes),
            train_dataset=small.table(small.texts()), peft_config=lora(),
            quantization_config=TorchAoConfig(form),
        )  # fmt: skip

    whole = trainer("whole")
    weight = whole.model.get_base_model().model.layers[0].mlp.up_proj.weight
    assert type(weight).__name__ == {8: "Int8Tensor", 4: "IntxUnpackedToInt8Tensor"}[bits]
    whole.train()
    trainer("cut", save_steps=2).train()
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    trained = [[w for n, w in t.model.named_parameters() if "lora_" in n] for t in (whole, resumed)]
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))
    assert any(w.abs().sum() > 0 for n, w in whole.model.named_parameters() if "lora_B" in n)


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("Int8DynamicActivationInt8WeightConfig", {}, "no gradient"),
        ("Int4WeightOnlyConfig", {"group_size": 32}, "may need a GPU"),
        ("Int4WeightOnlyConfig", {"group_size": 128}, "none was quantized"),
    ],
)
def test_bases_of_torchao_that_do_not_train_are_refused(
    tmp_path: Path, form: str, options: dict[str, Any], message: str
) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    from windlass import SFTTrainer
    from windlass.core.errors import WindlassError

    name = small.saved(tmp_path / "base", hidden_size=64, intermediate_size=64)
    with pytest.raises(WindlassError, match=message):
        SFTTrainer(
            name, small.arguments(tmp_path), train_dataset=small.table(small.texts()), peft_config=lora(),
            quantization_config=TorchAoConfig(getattr(quantization, form)(**options)),
        )  # fmt: skip


@pytest.mark.parametrize("kind", PROMPTS)
def test_losses_with_learnt_prompts_do_not_depend_on_the_batch_size(tmp_path: Path, kind: str) -> None:
    """A prompt that is embedded predicts the first label of each row, and a prefix does not."""
    rows = small.texts(10)

    def found(size: int) -> tuple[float, float]:
        torch.manual_seed(0)
        trainer = trainer_of(
            tmp_path / str(size), rows, peft_config=PROMPTS[kind](), max_steps=1, eval_dataset=small.table(rows),
            per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, per_device_eval_batch_size=size,
        )  # fmt: skip
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return before, trainer.state.log_history[-2]["loss"]

    one, four = found(1), found(4)
    assert one == pytest.approx(four, rel=1e-6)
    assert found(2) == pytest.approx(four, rel=1e-6)
