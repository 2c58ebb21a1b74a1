from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from tests.finetuning.tiny import encoder_decoder
from tests.trainer.small import bert, llama

from windlass.transforms.model_limits import ModelLimits

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def roberta(**changes: Any) -> Any:
    config = transformers.RobertaConfig(
        vocab_size=20, max_position_embeddings=18, pad_token_id=1, **SIZES, **changes
    )
    return transformers.RobertaForSequenceClassification(config)


def test_a_classifier_has_classes() -> None:
    assert ModelLimits.of(bert(labels=3)) == ModelLimits(20, 3, True, 16, True)


@pytest.mark.parametrize(
    "changes",
    [{"num_labels": 1}, {"problem_type": "regression"}, {"problem_type": "multi_label_classification"}],
)
def test_numbers_and_several_labels_have_no_classes(changes: dict[str, Any]) -> None:
    assert ModelLimits.of(roberta(**changes)).classes is None


def test_positions_behind_the_padding_are_counted() -> None:
    limits = ModelLimits.of(roberta())
    assert limits.positions == 16
    assert limits.positions_learned
    assert roberta()(input_ids=torch.full((1, 16), 5)).logits.shape == (1, 2)
    with pytest.raises((IndexError, RuntimeError)):
        roberta()(input_ids=torch.full((1, 17), 5))


def test_a_language_model_takes_its_tokens_as_labels() -> None:
    assert ModelLimits.of(llama()) == ModelLimits(20, 20, False, 32, False)
    assert ModelLimits.of(encoder_decoder("bart")).classes == 24
    assert ModelLimits.of(encoder_decoder("t5")).positions is None


def test_gpt2_names_its_positions_otherwise() -> None:
    config = transformers.GPT2Config(vocab_size=20, n_positions=12, n_embd=8, n_layer=1, n_head=2)
    assert ModelLimits.of(transformers.GPT2LMHeadModel(config)) == ModelLimits(20, 20, False, 12, True)


def test_an_adapter_is_looked_through() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(bert(), peft.LoraConfig(target_modules=["query"]))
    assert ModelLimits.of(model) == ModelLimits.of(bert())


def test_a_plain_module_declares_nothing() -> None:
    assert ModelLimits.of(nn.Linear(2, 2)) == ModelLimits()
