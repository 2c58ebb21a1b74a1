"""`padding_free` of `DPOTrainer`: a prompt is computed once for both of its answers, and nothing else changes."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.preferences import moved, pairs, settings

from windlass.core.errors import ConfigError, ModelError
from windlass.finetuning.dpo_trainer import DPOTrainer

transformers = pytest.importorskip("transformers")

# Steps in proportion to gradients: others make a difference of rounding near 0 as large as a step.
_PLAIN = {"optim": "sgd", "learning_rate": 0.5}
LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "per token": {"loss_type": ["ipo", "sft", "aot"], "ld_alpha": 0.4},
    "weighed": {"use_weighting": True},
    "cut": {"max_length": 6},
    "cut at the front": {"max_length": 6, "truncation_mode": "keep_end"},
    "recomputed": {"gradient_checkpointing": True},
}
_SIZES = {
    "vocab_size": 36, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1, "head_dim": 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("MistralConfig", {"sliding_window": 5}),
    "mixed": (
        "Gemma3TextConfig",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "absolute": ("GPT2Config", {}),
}


def precise(model: Any) -> Any:
    """`model` in double precision, its norms too, which round to single precision otherwise."""

    def norm(module: Any) -> Any:
        offset = 1.0 if "Gemma" in type(module).__name__ else 0.0

        def forward(states: torch.Tensor) -> torch.Tensor:
            scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)
            return scaled * (module.weight + offset)

        return forward

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
    return model.double()


def trainer_of(folder: Path, model: Any = None, rows: Any = None, **changes: Any) -> DPOTrainer:
    model = precise(small.model()) if model is None else model
    args = settings(folder, train_sampling_strategy="sequential", **{**_PLAIN, **changes})
    return DPOTrainer(
        model, precise(moved(copy.deepcopy(model))), args,
        train_dataset=rows or pairs(9), eval_dataset=pairs(5), processing_class=small.tokenizer(),
    )  # fmt: skip


def reports(trainer: DPOTrainer) -> list[dict[str, float]]:
    """What is logged of three updates and of an evaluation, and the weights after them."""
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row] + [trainer.evaluate()]
    skipped = ("runtime", "per_second", "epoch")
    found = [{n: v for n, v in row.items() if not any(part in n for part in skipped)} for row in rows]
    return [
        *found,
        {"weights": float(sum(p.detach().double().pow(2).sum() for p in trainer.model.parameters()))},
    ]


@pytest.mark.filterwarnings("ignore:truncation_mode='keep_end' is deprecated")
@pytest.mark.parametrize("case", LOSSES)
def test_reports_and_weights_are_those_of_padded_rows(tmp_path: Path, case: str) -> None:
    runs = [
        reports(trainer_of(tmp_path / str(shared), padding_free=shared, **LOSSES[case]))
        for shared in (False, True)
    ]
    for own, other in zip(*runs, strict=True):
        assert own == pytest.approx(other, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_padded_rows(tmp_path: Path, name: str) -> None:
    """Of attention in a window too, whose rows are longer than it, and of learnt positions."""
    kind, changes = MODELS[name]
    texts = [f" {row['chosen']} and saw" for row in pairs(5)]  # padding is shorter than the window
    rows = [
        {"prompt": "the old cat sat on a mat", "chosen": f" {one[:22]}", "rejected": f" {other[-22:]}"}
        for one, other in itertools.pairwise(texts)
    ]
    config = getattr(transformers, kind)(**_SIZES, **changes)
    for option in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, option, 0.0)
    found = []
    for shared in (False, True):
        torch.manual_seed(0)
        model = precise(transformers.AutoModelForCausalLM.from_config(config))
        trainer = trainer_of(tmp_path / str(shared), model, rows, padding_free=shared, max_steps=1)
        trainer.train()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert model.config._attn_implementation in ("sdpa", "eager")  # its own again
    assert float((found[0] - found[1]).abs().max()) < 1e-10


def test_the_model_computes_a_prompt_once(tmp_path: Path) -> None:
    """Counted: the tokens that a layer of the model gets."""
    rows = [{"prompt": "cat " * 20, "chosen": " dogs run", "rejected": " barn"}] * 8
    seen: list[int] = []
    trainer = trainer_of(tmp_path, rows=rows, padding_free=True, max_steps=1)
    trainer.model.model.layers[0].register_forward_hook(
        lambda _, args, __: seen.append(args[0][..., 0].numel())
    )
    trainer.train()
    # Of each pair 20 tokens of the prompt, whose last one is there twice, and answers of 2 and 1 with their ends.
    assert seen[-1] == 4 * (20 + 1 + 3 + 2)
    assert trainer.state.log_history[0]["num_tokens"] == 4 * (2 * 20 + 3 + 2)


def test_experts_have_their_balancing_loss_of_all_tokens(tmp_path: Path) -> None:
    """The mean over tokens is that of padded rows, in which a prompt counts twice."""
    config = transformers.MixtralConfig(
        **_SIZES,
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    found = []
    for shared in (False, True):
        torch.manual_seed(0)
        model = precise(transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager"))
        found.append(reports(trainer_of(tmp_path / str(shared), model, padding_free=shared)))
    assert found[0][0]["aux_loss"] > 0
    # The margins are small yet, so the loss of each pair is near ln 2.
    assert found[0][0]["loss"] == pytest.approx(math.log(2) + 0.1 * found[0][0]["aux_loss"], rel=1e-2)
    for own, other in zip(*found, strict=True):
        assert own == pytest.approx(other, rel=1e-6)  # transformers computes it in single precision


def test_a_model_that_cannot_is_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=36, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="cannot compute a prompt once for both of its answers"):
        trainer_of(tmp_path, model, padding_free=True)


def test_precomputed_log_probabilities_come_from_such_rows_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    runs = [
        reports(trainer_of(tmp_path / str(at), precompute_ref_log_probs=True, padding_free=shared))
        for at, shared in enumerate((False, True))
    ]
    for own, other in zip(*runs, strict=True):
        assert own == pytest.approx(other, rel=1e-10, abs=1e-12)


def test_what_it_contradicts_is_refused(tmp_path: Path) -> None:
    args = settings(tmp_path, padding_free=True)
    for others in ({"data_collator": list}, {"compute_metrics": lambda _: {}}):
        with pytest.raises(ConfigError, match="padding_free"):
            DPOTrainer(
                small.model(),
                None,
                args,
                train_dataset=pairs(4),
                processing_class=small.tokenizer(),
                **others,
            )
