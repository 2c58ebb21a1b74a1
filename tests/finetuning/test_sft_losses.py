"""The losses of SFTTrainer: weighted by probability, of a script's function, of a subclass, of balanced experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.finetuning import small
from tests.finetuning.trainers import trainer_of

from windlass import LossTerms, SFTTrainer

pytest.importorskip("transformers")
pytest.importorskip("datasets")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_batch_has_its_logits_made(tmp_path: Path, smoothing: float) -> None:
    """Neither by training and evaluation, nor by the measurements before them, which the head has 8 tokens for."""
    trainer = trainer_of(tmp_path, small.texts(), eval_dataset=small.table(small.texts(4)), eval_strategy="steps",
                         eval_steps=2, gradient_accumulation_steps=2, label_smoothing_factor=smoothing)  # fmt: skip
    sizes: list[int] = []
    head = trainer.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, logits: sizes.append(logits.numel()))
    trainer.evaluate()
    trainer.train()
    assert len(sizes) > 8
    assert max(sizes) <= 8 * head.out_features


def test_dft_weighs_each_term_by_its_probability(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, small.texts(4), loss_type="dft", max_steps=1)
    model = small.model()
    total = count = 0.0
    for row in trainer.train_dataset:
        log_p = F.log_softmax(model(torch.tensor([row["input_ids"]])).logits[0, :-1], -1)
        picked = log_p.gather(1, torch.tensor(row["labels"][1:])[:, None])
        total, count = total - float((picked * picked.exp()).sum().detach()), count + len(picked)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_loss_function_of_the_script_is_used_with_a_warning(tmp_path: Path) -> None:
    def double(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        loss = F.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        return 2 * loss / num_items_in_batch if num_items_in_batch is not None else loss

    with pytest.warns(FutureWarning, match="compute_loss_func"):
        trainer = trainer_of(tmp_path / "a", small.texts(), compute_loss_func=double)
    trainer.train()
    plain = trainer_of(tmp_path / "b", small.texts())
    plain.train()
    first = [t.state.log_history[0] for t in (trainer, plain)]
    assert first[0]["loss"] == pytest.approx(2 * first[1]["loss"], rel=1e-6)
    assert first[0]["entropy"] == pytest.approx(first[1]["entropy"], rel=1e-6)


def test_a_subclass_may_change_the_loss(tmp_path: Path) -> None:
    class Doubling(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 1}
    losses = []
    for kind in (Doubling, SFTTrainer):
        trainer = kind(
            small.model(), small.arguments(tmp_path / kind.__name__, **options), processing_class=small.tokenizer(),
            train_dataset=small.table(small.texts()),
        )  # fmt: skip
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(2 * losses[1], rel=1e-6)


def test_a_subclass_may_compute_with_the_outputs(tmp_path: Path) -> None:
    class Damped(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **count: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **count)
            loss = loss + outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    trainer = Damped(
        small.model(), small.arguments(tmp_path, max_steps=1, max_grad_norm=1e9), processing_class=small.tokenizer(),
        train_dataset=small.table(small.texts(4)),
    )  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[at] for at in range(4)])
    model, labels = small.model(), batch.pop("labels")
    logits = model(**batch).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    (loss + logits.square().mean()).backward()
    trainer.train()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_experts_are_balanced(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    def experts() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 36, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1))

    found = {}
    for weight in (0.0, 0.5):
        trainer = trainer_of(
            tmp_path / str(weight), small.texts(8), model=experts(), router_aux_loss_coef=weight, max_steps=1,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer.train()
        found[weight] = trainer.state.log_history[0]
    assert "aux_loss" not in found[0.0]
    assert found[0.5]["loss"] == pytest.approx(found[0.0]["loss"] + 0.5 * found[0.5]["aux_loss"], rel=1e-5)


def terms_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> LossTerms:
    targets = labels[:, 1:]
    total = F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return LossTerms(total, (targets != -100).sum())


class WithTerms(SFTTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask"))
        loss = terms_of(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


@pytest.mark.filterwarnings("ignore:.*compute_loss_func:FutureWarning")
@pytest.mark.parametrize("metrics", [None, lambda prediction: {"rows": len(prediction.predictions)}])
@pytest.mark.parametrize(("cls", "function"), [(WithTerms, None), (SFTTrainer, terms_of)])
def test_terms_are_trained_evaluated_and_predicted(
    cls: type[SFTTrainer], function: Any, metrics: Any, tmp_path: Path
) -> None:
    found = []
    for kind, loss_func in ((cls, function), (SFTTrainer, None)):
        data = small.table(small.texts())
        changes: dict[str, Any] = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "gradient_accumulation_steps": 2,
        }
        trainer = kind(
            small.model(), small.arguments(tmp_path / kind.__name__, **changes), processing_class=small.tokenizer(),
            train_dataset=data, eval_dataset=data, compute_loss_func=loss_func, compute_metrics=metrics,
        )  # fmt: skip
        trainer.train()
        predicted = trainer.predict(trainer.eval_dataset)
        history = trainer.state.log_history
        losses = [
            row.get("loss", row.get("eval_loss")) for row in history if row.keys() & {"loss", "eval_loss"}
        ]
        found.append([*losses, predicted.metrics["test_loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
