"""Answers in the evaluations of an SFTTrainer: their texts, scores and rows, and that training does not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.trainers import trainer_of

from windlass import SFTTrainer, TrainingArguments
from windlass.core.errors import ConfigError, DataError
from windlass.core.types import CACHES

pytest.importorskip("transformers")

ANSWERED: dict[str, Any] = {
    "predict_with_generate": True, "eval_metrics": ["exact_match", "token_f1"], "generation_max_new_tokens": 6,
    "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2,
}  # fmt: skip
PROMPTS = ["the cat", [{"role": "user", "content": "dogs run"}], {"prompt": "a mat", "reference": "on"}]


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


def answering(folder: Path, rows: Any = None, **changes: Any) -> SFTTrainer:
    held = changes.pop("eval_dataset", small.table(small.chats(5)))
    options = {**ANSWERED, "max_steps": 2, **changes}
    return trainer_of(folder, rows or small.chats(), eval_dataset=held, **options)


def greedy(model: Any, ids: list[int], tokens: int) -> list[int]:
    """Token by token, without a cache, padding or `generate`."""
    made: list[int] = []
    with torch.no_grad():
        while len(made) < tokens and made[-1:] != [1]:
            made.append(int(model(torch.tensor([ids + made])).logits[0, -1].argmax()))
    return made


@pytest.mark.parametrize("packing", [False, True])
def test_answers_are_what_the_model_writes_next(tmp_path: Path, packing: bool) -> None:
    trainer = answering(tmp_path, eval_prompts=PROMPTS, packing=packing)
    trainer.train()
    rows = [row for row in answers(tmp_path) if row["step"] == 2]
    assert [(row["set"], row["number"]) for row in rows] == [
        *[("eval", number) for number in range(5)], *[("prompts", number) for number in range(3)]
    ]  # fmt: skip
    words, model = small.tokenizer(), trainer.model.eval()
    for row in rows:
        expected = greedy(model, words(row["prompt"], add_special_tokens=False)["input_ids"], 6)
        assert row["answer"] == words.decode(expected, skip_special_tokens=True).strip()
        assert row["tokens"] == len(expected)
    assert rows[0]["reference"] == small.chats(5)[0]["messages"][1]["content"]
    assert [row["reference"] for row in rows[5:]] == [None, None, "on"]
    assert rows[5]["scores"] == {}
    logged = [row for row in trainer.state.log_history if "eval_loss" in row][-1]
    assert logged["eval_token_f1"] == sum(row["scores"]["token_f1"] for row in rows[:5]) / 5
    assert logged["eval_prompts_exact_match"] == rows[7]["scores"]["exact_match"]


def test_beams_and_lengths_are_those_asked_for_within_the_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, made = answering(tmp_path, generation_max_new_tokens=None, generation_num_beams=3), []
    generate = trainer.model.generate

    def watched(*, input_ids: Any, generation_config: Any, **options: Any) -> Any:
        made.append((generation_config.num_beams, generation_config.max_new_tokens, input_ids.shape[1]))
        return generate(input_ids=input_ids, generation_config=generation_config, **options)

    monkeypatch.setattr(trainer.model, "generate", watched)
    trainer.evaluate()
    assert len(made) == 3
    for beams, tokens, width in made:  # the default is 128 tokens, and the model has 128 positions
        assert (beams, tokens) == (3, 128 - width)


def test_answers_of_a_remote_run_are_in_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_STAGING", str(tmp_path / "staging"))
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket/run"
    trainer = answering(url, max_steps=1)  # type: ignore[arg-type]  # a path would lose one of its slashes
    trainer.evaluate()
    assert [row["step"] for row in answers(trainer.output_folder)] == [0] * 5
    trainer.train()
    assert {row["step"] for row in answers(tmp_path / "bucket" / "run")} == {0, 1}
    assert {path.name for path in tmp_path.iterdir()} == {"bucket", "staging"}


def test_generation_of_a_packed_run_has_the_attention_of_padded_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = answering(tmp_path, packing=True), set()
    own = trainer.model.config._attn_implementation
    forward = type(trainer.model).forward

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        cached = any(kwargs.get(name) is not None for name in CACHES)
        seen.add((cached, model.config._attn_implementation))
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(type(trainer.model), "forward", watched)
    trainer.train()
    assert (True, own) in seen
    assert {attention for cached, attention in seen if cached} == {own}


def test_training_has_the_same_bits_with_answers(tmp_path: Path) -> None:
    runs = {
        name: answering(tmp_path / name, model=small.model(attention_dropout=0.3), **changes)
        for name, changes in {
            "without": {
                "predict_with_generate": False,
                "eval_metrics": [],
                "generation_max_new_tokens": None,
            },
            "with": {},
            "sampled": {"generation_do_sample": True},
        }.items()
    }
    for run in runs.values():
        run.train()
    weights = [[p.detach() for p in run.model.parameters()] for run in runs.values()]
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))
    greedy_texts, sampled = ([row["answer"] for row in answers(tmp_path / n)] for n in ("with", "sampled"))
    assert greedy_texts != sampled
    before = torch.get_rng_state()
    runs["sampled"].evaluate()  # outside a run
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_prompts_get_drawn_answers_of_their_own(tmp_path: Path) -> None:
    answering(tmp_path, eval_prompts=["the cat"] * 6, generation_do_sample=True, max_steps=1).train()
    found = [row["answer"] for row in answers(tmp_path) if row["set"] == "prompts"]
    assert len(set(found)) == 6, "within a batch, and of the batches"


def test_a_resumed_run_writes_the_same_answers(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_prompts": PROMPTS,
    }
    for name in ("whole", "cut"):
        answering(tmp_path / name, **options, generation_do_sample=True).train()
    expected = (tmp_path / "whole/answers.jsonl").read_bytes()
    assert (tmp_path / "cut/answers.jsonl").read_bytes() == expected
    with (tmp_path / "cut/answers.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "set"')  # a killed write
    again = answering(tmp_path / "cut", **options, generation_do_sample=True)
    again.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-1"))
    assert (tmp_path / "cut/answers.jsonl").read_bytes() == expected


def test_compute_metrics_gets_texts_and_selects_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.finetuning.answers.ROWS_KEPT", 2)
    given: list[Any] = []

    def measure(prediction: Any) -> dict[str, float]:
        given.append(prediction)
        return {"length": sum(map(len, prediction.predictions))}

    options = {**ANSWERED, "max_steps": 2, "eval_metrics": [], "save_strategy": "steps", "save_steps": 1}
    args = small.arguments(tmp_path, **options, metric_for_best_model="length", load_best_model_at_end=True)
    trainer = SFTTrainer(
        small.model(), args, train_dataset=small.table(small.prompts()), processing_class=small.tokenizer(),
        eval_dataset=small.table(small.prompts(3)), compute_metrics=measure,
    )  # fmt: skip
    trainer.train()
    assert given[0].label_ids == [row["completion"].strip() for row in small.prompts(3)]
    assert given[0].inputs == [row["prompt"] for row in small.prompts(3)]
    assert trainer.state.best_metric == max(sum(map(len, one.predictions)) for one in given)
    assert [row["number"] for row in answers(tmp_path)] == [0, 1] * len(given), "all are scored, two are kept"


def test_sets_of_a_dict_and_the_limit(tmp_path: Path) -> None:
    held = {"one": small.table(small.prompts(3)), "two": small.table(small.prompts(5))}
    trainer = answering(
        tmp_path, small.prompts(), eval_dataset=held, eval_prompts_limit=2, eval_prompts=["a cat"]
    )
    metrics = trainer.evaluate()
    assert {"eval_one_exact_match", "eval_two_exact_match"} <= metrics.keys()
    expected = [("one", 0), ("one", 1), ("prompts", 0), ("two", 0), ("two", 1)]
    assert [(row["set"], row["number"]) for row in answers(tmp_path)] == expected
    assert "eval_exact_match" in trainer.evaluate(small.table(small.prompts(1)))


def test_an_adapter_answers(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = answering(tmp_path, peft_config=peft.LoraConfig(target_modules="all-linear", r=2))
    trainer.train()
    assert len(answers(tmp_path)) == 10


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"the cat"\n\n{"prompt": "a mat", "reference": "on"}\n')
    trainer = answering(tmp_path / "run", predict_with_generate=False, eval_prompts=str(path))
    assert "eval_prompts_exact_match" in trainer.evaluate()
    path.write_text(
        '\ufeff"the cat"\n"a\u2028mat"\n', encoding="utf-8"
    )  # a mark, and a separator that JSON allows
    answering(tmp_path / "marked", predict_with_generate=False, eval_prompts=str(path)).evaluate()
    assert [answer["prompt"] for answer in answers(tmp_path / "marked")] == ["the cat", "a\u2028mat"]
    path.write_text('"the cat"\n{"prompt": 3}\n')
    with pytest.raises(DataError, match=r"prompts.jsonl, line 2: prompt must be a list of messages, not int"):
        answering(tmp_path / "run", predict_with_generate=False, eval_prompts=str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_metrics": []}, "predict_with_generate.*the answers are not scored"),
        ({"predict_with_generate": False}, "eval_metrics.*none are generated"),
        ({"generation_max_length": 9}, "generation_max_length.*set only one"),
        ({"eval_metrics": ["accuracy"]}, "eval_metrics.*accuracy"),
        ({"eval_prompts": []}, "eval_prompts.*must be a list of prompts"),
        ({"eval_dataset": None, "eval_strategy": "no"}, "predict_with_generate.*pass eval_dataset"),
        ({"eval_dataset": small.texts(3)}, "the eval dataset, row 0: has no prompt"),
        (
            {"eval_dataset": [{"messages": [{"role": "user", "content": "a"}]}]},
            "row 0: has no prompt.*the last message is of the role 'user'",
        ),
        ({"generation_max_new_tokens": 126}, "row 0: a prompt of .* tokens and an answer of 126 .*128"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        answering(tmp_path, **changes)


def tokenized(row: dict[str, Any], how: str) -> dict[str, Any]:
    encode = small.tokenizer()
    prompt, answer = encode(row["prompt"])["input_ids"], [*encode(row["completion"])["input_ids"], 1]
    ids, mask = [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)
    if how == "labels":  # padded, as a plain Trainer's rows may be
        return {
            "input_ids": [*ids, 0], "labels": [*([-100] * len(prompt)), *answer, -100],
            "attention_mask": [1] * len(ids) + [0],
        }  # fmt: skip
    return {"input_ids": ids, "completion_mask": mask}


@pytest.mark.parametrize("how", ["labels", "completion_mask"])
def test_tokenized_rows_have_the_answers_of_their_texts(tmp_path: Path, how: str) -> None:
    held = small.prompts(5)
    found = []
    for name, rows in (("texts", held), ("tokens", [tokenized(row, how) for row in held])):
        trainer = answering(tmp_path / name, small.prompts(), eval_dataset=small.table(rows))
        trainer.train()
        found.append((answers(tmp_path / name), trainer.evaluate()["eval_token_f1"]))
    assert found[0] == found[1]
    assert all(row["reference"] for row in found[0][0])


def test_tokenized_rows_without_a_prompt_are_refused(tmp_path: Path) -> None:
    rows = [tokenized(row, "labels") for row in small.prompts(3)]
    rows[2]["labels"] = list(rows[2]["input_ids"])
    with pytest.raises(DataError, match=r"row 2.*none or all"):
        answering(tmp_path, small.prompts(), eval_dataset=small.table(rows))


def test_a_plain_trainer_is_told_who_answers() -> None:
    with pytest.raises(ConfigError, match=r"eval_prompts=.*SFTTrainer.*tokenized rows"):
        TrainingArguments("x", eval_prompts=["the cat"])


def test_a_prompt_beyond_the_models_positions_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"the cat"\n\n' + json.dumps("the cat " * 80) + "\n")
    with pytest.raises(
        DataError, match=r"prompts.jsonl, line 3: a prompt of 160 tokens .* positions of the model \(128\)"
    ):
        answering(tmp_path, eval_prompts=str(path))
