"""Evaluations that generate text, beside transformers' own `Seq2SeqTrainer`."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers
from tests.finetuning.tiny import END, PAD, encoder_decoder, pairs, settings, tokenizer

from windlass import (
    ConfigError,
    LossTerms,
    ModelError,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from windlass.data.collate_pad import DataCollatorForSeq2Seq


def exact_share(prediction: Any) -> dict[str, float]:
    """A metric of decoded text, as scripts compute it: -100 becomes the pad token first."""
    texts = [
        tokenizer().batch_decode(np.where(ids == -100, PAD, ids), skip_special_tokens=True)
        for ids in (prediction.predictions, prediction.label_ids)
    ]
    common = [len(set(a.split()) & set(b.split())) for a, b in zip(*texts, strict=True)]
    return {"common": float(np.mean(common)), "words": float(np.mean([len(t.split()) for t in texts[0]]))}


def ours(folder: Path, model: Any, **changes: Any) -> Seq2SeqTrainer:
    data = {key: changes.pop(key) for key in ("train_dataset", "eval_dataset") if key in changes}
    return Seq2SeqTrainer(
        model, Seq2SeqTrainingArguments(**settings(folder, **changes)), processing_class=tokenizer(),
        compute_metrics=exact_share, **data,
    )  # fmt: skip


def theirs(folder: Path, model: Any, **changes: Any) -> Any:
    data = {key: changes.pop(key) for key in ("train_dataset", "eval_dataset") if key in changes}
    args = transformers.Seq2SeqTrainingArguments(**settings(folder, **changes))
    collate = transformers.DataCollatorForSeq2Seq(tokenizer(), model)
    return transformers.Seq2SeqTrainer(
        model, args, data_collator=collate, processing_class=tokenizer(),
        compute_metrics=exact_share, **data,
    )  # fmt: skip


def ids(array: Any) -> list[list[int]]:
    """Rows without the padding, which the two libraries make of different width."""
    return [[token for token in row if token not in (-100, PAD)] for row in np.asarray(array).tolist()]


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"generation_max_length": 20}, {}),
        ({"generation_max_length": 9, "generation_num_beams": 3}, {}),
        ({"generation_max_length": 9}, {"max_new_tokens": 5, "num_beams": 2, "length_penalty": 2.0}),
        ({"generation_config": "object"}, {}),
    ],
    ids=["length", "beams", "of the call", "configuration"],
)
def test_the_same_ids_and_metrics(
    kind: str, changes: dict[str, Any], asked: dict[str, Any], tmp_path: Path
) -> None:
    if "generation_config" in changes:
        config = transformers.GenerationConfig(
            max_length=12, num_beams=2, decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=END
        )
        changes = {"generation_config": config}
    data = pairs()
    found = ours(tmp_path, encoder_decoder(kind), **changes).predict(data, **asked)
    expected = theirs(tmp_path, encoder_decoder(kind), **changes).predict(data, **asked)
    assert ids(found.predictions) == ids(expected.predictions)
    assert len({tuple(row) for row in ids(found.predictions)}) > 5, (
        "a model that always writes the same shows nothing"
    )
    assert ids(found.label_ids) == ids(expected.label_ids) == [row["labels"] for row in data]
    for name in ("test_common", "test_words"):
        assert found.metrics[name] == expected.metrics[name]


def test_without_a_length_every_batch_has_that_of_generate(tmp_path: Path) -> None:
    """transformers changes the model's generation_config after the first batch, and stops later ones earlier."""
    data = pairs()
    model = encoder_decoder()
    before = model.generation_config.to_dict()
    found = [
        ours(tmp_path, model, per_device_eval_batch_size=size).predict(data).predictions for size in (2, 16)
    ]
    assert found[0].tolist() == found[1].tolist()
    assert found[0].shape[1] == 21
    assert model.generation_config.to_dict() == before
    expected = theirs(tmp_path, encoder_decoder()).predict(data).predictions
    assert found[0][:, :19].tolist() == expected[:, :19].tolist()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_training_with_evaluations_beside_transformers(smoothing: float, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "generation_max_length": 9, "logging_steps": 1,
        "label_smoothing_factor": smoothing, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    runs = []
    for make in (ours, theirs):
        sets = {"train_dataset": pairs(23), "eval_dataset": pairs(10, seed=8)}
        trainer = make(tmp_path, encoder_decoder("bart"), **changes, **sets)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "eval_loss" in row]
        runs.append(
            ([row["eval_loss"] for row in rows], [(row["eval_common"], row["eval_words"]) for row in rows])
        )
    (losses, metrics), (their_losses, their_metrics) = runs
    assert len(losses) == 2
    assert losses[0] != losses[1]
    assert metrics == their_metrics
    if smoothing == 0:
        # A mean over targets here, a mean of the means of batches there.
        assert losses == pytest.approx(their_losses, rel=0.02)


def test_loss_beside_generation_is_that_of_an_evaluation_without(tmp_path: Path) -> None:
    losses = {
        flag: ours(tmp_path, encoder_decoder(), predict_with_generate=flag, eval_dataset=pairs()).evaluate
        for flag in (True, False)
    }
    generating = losses[True]()
    plain = Seq2SeqTrainer(
        encoder_decoder(), Seq2SeqTrainingArguments(**settings(tmp_path, predict_with_generate=False)),
        processing_class=tokenizer(), eval_dataset=pairs(),
    ).evaluate()  # fmt: skip
    assert generating["eval_loss"] == plain["eval_loss"]
    assert "eval_common" in generating


def terms_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> LossTerms:
    logits = outputs["logits"].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    return LossTerms(total, (labels != -100).sum())


class WithTerms(Seq2SeqTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = terms_of(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize(("cls", "function"), [(WithTerms, None), (Seq2SeqTrainer, terms_of)])
def test_terms_are_trained_evaluated_and_predicted(
    cls: type[Seq2SeqTrainer], function: Any, generates: bool, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "generation_max_length": 6, "logging_steps": 1,
        "gradient_accumulation_steps": 2, "predict_with_generate": generates,
    }  # fmt: skip
    found = []
    for kind, loss_func in ((cls, function), (Seq2SeqTrainer, None)):
        trainer = kind(
            encoder_decoder("bart").double(), Seq2SeqTrainingArguments(**settings(tmp_path / kind.__name__, **changes)),
            processing_class=tokenizer(), train_dataset=pairs(23), eval_dataset=pairs(10, seed=8),
            compute_loss_func=loss_func,
        )  # fmt: skip
        trainer.train()
        predicted = trainer.predict(pairs(5)).metrics["test_loss"]
        losses = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history]
        found.append([*filter(None, losses), predicted])
    assert len(found[0]) == 7
    # In single precision, Adam's division makes of two orders of one sum 3e-5 after four updates, on some processors.
    assert found[0] == pytest.approx(found[1], rel=1e-10)


def test_text_without_labels(tmp_path: Path) -> None:
    found = ours(tmp_path, encoder_decoder()).predict(pairs(labelled=False))
    labelled = ours(tmp_path, encoder_decoder()).predict(pairs())
    assert found.label_ids is None
    assert "test_loss" not in found.metrics
    assert found.predictions.tolist() == labelled.predictions.tolist()


def test_the_longest_first_and_predictions_in_the_order_of_the_data(tmp_path: Path) -> None:
    data = pairs(23)
    trainer = ours(tmp_path, encoder_decoder(), sortish_sampler=True, train_dataset=data)
    widths = [batch["input_ids"].shape[1] for batch in trainer.get_eval_dataloader(data)]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) > 2
    assert trainer.args.train_sampling_strategy == "group_by_length"
    found = trainer.predict(data)
    plain = ours(tmp_path, encoder_decoder()).predict(data)
    assert ids(found.predictions) == ids(plain.predictions)
    assert ids(found.label_ids) == [row["labels"] for row in data]


def test_named_sets_inherit_the_arguments_of_the_call(tmp_path: Path) -> None:
    sets = {"one": pairs(3), "two": pairs(4, seed=9)}
    trainer = ours(tmp_path, encoder_decoder(), eval_dataset=sets)
    short = trainer.evaluate(max_new_tokens=2)
    assert short["eval_one_words"] <= 2 >= short["eval_two_words"]
    assert trainer.evaluate()["eval_two_words"] > 2, "they do not outlive the call"


def test_a_configuration_by_every_form(tmp_path: Path) -> None:
    config = transformers.GenerationConfig(max_length=7, num_beams=2, pad_token_id=PAD, eos_token_id=END)
    config.save_pretrained(tmp_path / "folder")
    file = tmp_path / "folder" / "generation_config.json"
    for form in (config, config.to_dict(), tmp_path / "folder", str(tmp_path / "folder"), str(file)):
        trainer = ours(tmp_path, encoder_decoder(), generation_config=form)
        assert trainer.model.generation_config.num_beams == 2
        assert trainer.model.generation_config is not form
    args = Seq2SeqTrainingArguments(**settings(tmp_path, generation_config=config))
    assert type(args)(**args.to_dict()).to_dict() == args.to_dict()
    made = Seq2SeqTrainer(
        model_init=encoder_decoder, args=args, processing_class=tokenizer(), train_dataset=pairs()
    )
    made.train()
    assert made.model.generation_config.num_beams == 2


@pytest.mark.parametrize(
    ("form", "match"),
    [
        ("no-such-folder", "generation_config='no-such-folder': cannot be used"),
        (
            7,
            "generation_config=7: must be a GenerationConfig, a dict of its values, or the name or path of one",
        ),
        ({"num_beams": 1, "early_stopping": True}, "generation_config=.*cannot be used.*early_stopping"),
    ],
)
def test_a_bad_configuration(form: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        ours(tmp_path, encoder_decoder(), generation_config=form)


def test_what_cannot_generate_is_refused(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(**settings(tmp_path))
    with pytest.raises(ModelError, match="predict_with_generate=True needs a model with a `generate` method"):
        Seq2SeqTrainer(torch.nn.Linear(2, 2), args)
    plain = {name: value for name, value in settings(tmp_path).items() if name != "predict_with_generate"}
    with pytest.raises(ConfigError, match="args='TrainingArguments': must be Seq2SeqTrainingArguments"):
        Seq2SeqTrainer(encoder_decoder(), TrainingArguments(**plain))


def test_an_override_that_sets_arguments_of_generation(tmp_path: Path) -> None:
    """Scripts for question answering evaluate in a method of their own, which sets `_gen_kwargs`."""

    class Own(Seq2SeqTrainer):
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval",
                     **gen_kwargs: Any) -> Any:  # fmt: skip
            self._gen_kwargs = {"max_length": 3, "num_beams": None, **gen_kwargs}
            loader = self.get_eval_dataloader(eval_dataset)
            return self.evaluation_loop(loader, "Evaluation", metric_key_prefix=metric_key_prefix)

    args = Seq2SeqTrainingArguments(**settings(tmp_path))
    collate = DataCollatorForSeq2Seq(tokenizer())
    output: Any = Own(encoder_decoder(), args, collate, compute_metrics=exact_share).evaluate(pairs())
    assert output.predictions.shape[1] == 3


@pytest.mark.parametrize("name", ["evaluate", "predict", "prediction_step", "_pad_tensors_to_max_len"])
def test_a_method_copied_from_transformers_gives_the_same_text(name: str, tmp_path: Path) -> None:
    import transformers.trainer_seq2seq as module

    code = textwrap.indent(
        textwrap.dedent(inspect.getsource(getattr(transformers.Seq2SeqTrainer, name))), "    "
    )
    made: dict[str, Any] = {**vars(module), "Trainer": Seq2SeqTrainer}
    exec(f"class Mine(Trainer):\n{code}", made)
    found = []
    for cls in (Seq2SeqTrainer, made["Mine"]):
        args = Seq2SeqTrainingArguments(**settings(tmp_path, generation_max_length=9))
        trainer = cls(
            encoder_decoder(), args, DataCollatorForSeq2Seq(tokenizer()), processing_class=tokenizer(),
            compute_metrics=exact_share,
        )  # fmt: skip
        predicted = trainer.predict(pairs())
        evaluated = trainer.evaluate(pairs(), max_length=6)
        found.append((ids(predicted.predictions), ids(predicted.label_ids), evaluated["eval_common"]))
    assert found[0] == found[1]
