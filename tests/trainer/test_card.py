"""Model cards: what `huggingface_hub.ModelCard` reads is what the run did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.trainer import card_facts


def read(folder: Path) -> Any:
    hub = pytest.importorskip("huggingface_hub", reason="the client of the Hub")
    return hub.ModelCard.load(folder / "README.md")


@pytest.fixture
def trained(tmp_path: Path) -> Trainer:
    args = arguments(
        tmp_path, eval_strategy="steps", eval_steps=2, logging_steps=1, metric_for_best_model="accuracy"
    )
    trainer = Trainer(
        Net(), args, train_dataset=rows(16), eval_dataset=rows(4), compute_metrics=lambda _: {"accuracy": 0.5}
    )
    trainer.train()
    return trainer


def test_the_card_of_a_run_is_in_the_format_of_the_hub(trained: Trainer, tmp_path: Path) -> None:
    trained.create_model_card(
        language="en", license="mit", tags="small", model_name="Net of three", finetuned_from="someone/base",
        tasks="text-classification", dataset_tags="someone/rows", dataset="Rows", dataset_args="plain",
    )  # fmt: skip
    card = read(tmp_path)
    assert (card.data.license, card.data.language, card.data.base_model) == ("mit", ["en"], "someone/base")
    assert (card.data.library_name, card.data.pipeline_tag) == ("windlass", "text-classification")
    assert (card.data.tags, card.data.datasets) == (
        ["small", "windlass", "generated_from_trainer"],
        ["someone/rows"],
    )
    assert card.data.model_name == "Net of three"
    logged = [entry for entry in trained.state.log_history if "eval_loss" in entry][-1]
    found = {result.metric_type: result for result in card.data.eval_results}
    assert {name: one.metric_value for name, one in found.items()} == {
        "loss": logged["eval_loss"], "accuracy": 0.5
    }  # fmt: skip
    loss = found["loss"]
    assert (loss.task_type, loss.dataset_type, loss.dataset_name) == (
        "text-classification", "someone/rows", "Rows"
    )  # fmt: skip
    assert loss.dataset_args == "plain"


def test_what_people_read(trained: Trainer, tmp_path: Path) -> None:
    trained.create_model_card(model_name="Net of three", dataset=["rows"])
    text = read(tmp_path).text
    assert "A Net of 15 parameters, trained from scratch on rows." in text
    assert "| learning_rate | 0.05 |" in text
    assert "| torch | " in text
    (first, _) = [entry["eval_loss"] for entry in trained.state.log_history if "eval_loss" in entry]
    assert f" {first:.4g} |" in text
    curve = text.partition("## Loss curve\n\n```text\n")[2].partition("```")[0]
    assert curve.count("*") == len([e for e in trained.state.log_history if "loss" in e])


def test_a_later_card_keeps_tags_and_licence_of_an_earlier_one(trained: Trainer, tmp_path: Path) -> None:
    trained.create_model_card(tags="small", license="mit")
    trained.create_model_card(tags=["more"])
    data = read(tmp_path).data
    assert data.tags == ["more", "small", "windlass", "generated_from_trainer"]
    assert data.license == "mit"


def test_without_given_facts_results_are_of_an_unknown_dataset(trained: Trainer, tmp_path: Path) -> None:
    trained.create_model_card()
    data = read(tmp_path).data
    assert {(r.task_type, r.dataset_type) for r in data.eval_results} == {("other", "unknown")}
    assert (data.base_model, data.license, data.datasets) == (None, None, None)


def test_datasets_of_the_hub_are_found() -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets")
    data = datasets.Dataset.from_dict({"x": [1]}, split=datasets.Split.TEST)
    data.info.config_name = "mrpc"
    data.info.download_checksums = {"hf://datasets/nyu-mll/glue@bcdc/mrpc/test.parquet": {}, "/tmp/x": {}}
    assert card_facts.datasets_of({"one": data}) == {"nyu-mll/glue": {"config": "mrpc", "split": "test"}}
    assert card_facts.datasets_of(rows(2)) == {}


def test_what_a_model_tells(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="a model of transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    model = transformers.BertForSequenceClassification(config)
    facts = card_facts.facts_of(model)
    assert (facts.library, facts.tasks, facts.base) == ("transformers", ["text-classification"], None)
    model.save_pretrained(tmp_path)
    saved = card_facts.facts_of_files(tmp_path)
    assert (saved.kind, saved.library, saved.tasks) == (facts.kind, facts.library, facts.tasks)
    model.config._name_or_path = str(tmp_path)
    assert card_facts.facts_of(model).base is None, "a folder of this machine"
    model.config._name_or_path = "google-bert/bert-base-cased"
    assert card_facts.facts_of(model).base == "google-bert/bert-base-cased"
    plain = card_facts.facts_of(Net())
    assert (plain.kind, plain.parameters, plain.library, plain.tasks) == ("Net", 15, "windlass", [])


def row(step: int, **metrics: float) -> dict[str, float]:
    return {"step": step, "epoch": step / 10, **metrics}


def test_the_results_are_those_of_the_published_weights() -> None:
    during = [row(2, eval_loss=1.0), row(4, eval_loss=3.0, eval_runtime=9.0), row(4, eval_acc=float("nan"))]
    end = row(4, train_runtime=1.0)
    assert card_facts.results([*during, end], None) == {"loss": 3.0}
    assert card_facts.results([*during, end], 2) == {"loss": 1.0}
    assert card_facts.results([*during, end, row(4, eval_loss=0.5)], 2) == {"loss": 0.5}
    assert card_facts.results([], None) == {}
