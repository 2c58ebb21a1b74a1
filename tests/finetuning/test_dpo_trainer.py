"""`DPOTrainer`: the ways to have a reference, mistakes in the rows, and a run that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.preferences import moved, pairs, settings

from windlass import TrainerCallback
from windlass.checkpoint.files import Files
from windlass.core.errors import ConfigError, DataError
from windlass.data.order import sample_lengths
from windlass.finetuning import frozen_reference
from windlass.finetuning.dpo_config import DPOConfig
from windlass.finetuning.dpo_trainer import DPOTrainer
from windlass.text.forms import LocatedRows

pytest.importorskip("transformers")


def trainer_of(folder: Path, model: Any = None, ref_model: Any = None, **changes: Any) -> DPOTrainer:
    others = {name: changes.pop(name) for name in ("peft_config", "eval_dataset") if name in changes}
    rows = changes.pop("rows", None) or pairs()
    return DPOTrainer(
        model or small.model(), ref_model, settings(folder, **changes), train_dataset=rows,
        processing_class=small.tokenizer(), **others,
    )  # fmt: skip


def logs_of(trainer: DPOTrainer) -> list[dict[str, float]]:
    trainer.train()
    return [
        {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
        for entry in trainer.state.log_history[:3]
    ]


def test_the_model_learns_to_prefer(tmp_path: Path) -> None:
    logs = logs_of(trainer_of(tmp_path, max_steps=12, logging_steps=4))
    assert logs[0]["loss"] > logs[-1]["loss"]
    assert logs[-1]["rewards/accuracies"] > 0.9


def test_rows_are_grouped_by_the_length_of_the_longest_answer(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, train_sampling_strategy="group_by_length", max_steps=1)
    assert trainer.train().global_step == 1
    rows = list(trainer.train_dataset)
    expected = [len(r["prompt_ids"]) + max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in rows]
    assert len(set(expected)) > 1
    assert sample_lengths(trainer.train_dataset).tolist() == expected


def test_a_second_model_and_a_copy_of_the_first_are_the_same_reference(tmp_path: Path) -> None:
    runs = [
        logs_of(trainer_of(tmp_path / str(at), ref_model=model))
        for at, model in enumerate((None, small.model()))
    ]
    assert runs[0] == runs[1]


def test_precomputed_and_kept_log_probabilities_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    wanted = logs_of(trainer_of(tmp_path / "a", eval_dataset=pairs(5)))
    for name in ("b", "c"):
        trainer = trainer_of(tmp_path / name, eval_dataset=pairs(5), precompute_ref_log_probs=True)
        assert trainer.ref_model is None
        assert len(list((tmp_path / "home" / "reference").iterdir())) == 2
        for own, other in zip(logs_of(trainer), wanted, strict=True):
            assert own == pytest.approx(other, rel=1e-5, abs=1e-6)
        trainer.evaluate()
        with pytest.raises(ConfigError, match="the model before training"):
            trainer.evaluate(pairs(3))


@pytest.mark.parametrize("full_at", ["ensure_folder", "create", "write", "fsync", "rename"])
def test_a_full_disk_keeps_no_log_probabilities_and_stops_no_run(
    full_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home" / "reference"
    monkeypatch.setenv("WINDLASS_HOME", str(home.parent))

    def full(self: Files, operation: str, path: Path) -> None:
        if operation == full_at and home in (path, *path.parents):
            raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as changed:
        changed.setattr(Files, "before", full)
        wanted = trainer_of(tmp_path / "a", precompute_ref_log_probs=True).train_dataset["ref_chosen_logps"]
    said = next(record.getMessage() for record in caplog.records if "were not kept" in record.getMessage())
    assert "No space left on device" in said
    assert not home.exists() or not list(home.iterdir())
    again = trainer_of(tmp_path / "b", precompute_ref_log_probs=True)
    assert list(again.train_dataset["ref_chosen_logps"]) == list(wanted)
    assert len(list(home.iterdir())) == 1


def test_a_run_that_writes_the_same_log_probabilities_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may write them at the same time: its temporary file is not this one's."""
    home = tmp_path / "home" / "reference"
    monkeypatch.setenv("WINDLASS_HOME", str(home.parent))
    written: list[Path] = []

    def begin_twice(self: Files, operation: str, path: Path) -> None:
        if operation == "create" and path.parent == home:
            written.append(path)
            if len(written) == 1:
                trainer_of(tmp_path / "other", precompute_ref_log_probs=True)

    monkeypatch.setattr(Files, "before", begin_twice)
    trainer_of(tmp_path / "one", precompute_ref_log_probs=True)
    assert len(set(written)) == 2
    assert len(list(home.iterdir())) == 1


def test_what_was_kept_of_a_model_with_equal_weights_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    for epsilon in (1e-6, 1e-2):
        options: dict[str, Any] = {"train_dataset": pairs(2), "processing_class": small.tokenizer()}
        kept, fresh = (
            DPOTrainer(
                small.model(rms_norm_eps=epsilon), None, settings(tmp_path, precompute_ref_log_probs=early), **options
            )
            for early in (True, False)
        )  # fmt: skip
        batch = fresh.data_collator([fresh.train_dataset[0]])
        expected = float(fresh.compute_ref_log_probs(fresh.model, batch)[0])
        assert kept.train_dataset[0]["ref_chosen_logps"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("library", ["torch", "transformers", "peft", "bitsandbytes", "torchao"])
def test_what_another_version_of_a_library_computed_is_not_used(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    for version in ("1", "2"):
        versions = {library: version}
        monkeypatch.setattr(frozen_reference, "version_of", versions.get)
        trainer_of(tmp_path / "run", rows=pairs(2), precompute_ref_log_probs=True)
    assert len(list((tmp_path / "home" / "reference").iterdir())) == 2


def test_nothing_is_kept_of_a_model_of_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code may change while its weights and its configuration do not."""
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    first, second = small.model(), small.model()
    first.lm_head.__class__ = type("Head", (torch.nn.Linear,), {"__module__": "script"})
    forward = second.lm_head.forward
    second.lm_head.forward = lambda hidden: forward(hidden)
    for model in (first, second):
        trainer_of(tmp_path / "run", model=model, precompute_ref_log_probs=True)
        assert not (tmp_path / "home" / "reference").exists()


def test_log_probabilities_of_a_base_of_few_bits_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    peft = pytest.importorskip("peft")
    from transformers import TorchAoConfig

    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    base = small.saved(tmp_path / "base")
    trainer = DPOTrainer(
        base, None, settings(tmp_path / "out", precompute_ref_log_probs=True), train_dataset=pairs(4),
        quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig()),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["rewards/margins"] == 0.0
    assert len(list((tmp_path / "home" / "reference").iterdir())) == 1


def test_outputs_of_a_training_loss_have_a_graph(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    batch = trainer.data_collator([trainer.train_dataset[at] for at in range(2)])
    assert trainer.compute_loss(trainer.model, batch, return_outputs=True)[1].logits.requires_grad


def test_the_reference_is_rounded_as_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    first = {}
    for qat in (None, "int8"):
        trainer = trainer_of(tmp_path / f"{qat} kept", qat=qat, precompute_ref_log_probs=True)
        first[qat] = trainer.train_dataset[0]["ref_chosen_logps"]
        logs = logs_of(trainer_of(tmp_path / f"{qat}", qat=qat))
        assert logs[0]["rewards/margins"] == 0.0 != logs[2]["rewards/margins"]
        assert logs_of(trainer)[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert first[None] != first["int8"], "what was kept of the model without qat is found"


def test_without_its_adapter_a_model_is_its_own_reference(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = trainer_of(tmp_path / "a", peft_config=lora, learning_rate=0.1)
    assert trainer.ref_model is None
    logs = logs_of(trainer)
    assert logs[0]["rewards/margins"] == 0.0 != logs[2]["rewards/margins"]
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)


def test_an_adapter_that_is_trained_further_is_compared_with_itself_as_it_was(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    adapted = moved(peft.get_peft_model(small.model(), lora))
    frozen = [p.requires_grad_(False) for n, p in adapted.named_parameters() if "lora_A" in n]
    trainer = trainer_of(tmp_path / "a", adapted, learning_rate=0.1)
    before = {n: p.detach().clone() for n, p in adapted.named_parameters() if ".ref." in n}
    logs = logs_of(trainer)
    assert before
    assert logs[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert logs[2]["rewards/margins"] != 0.0
    assert all(torch.equal(before[n], p) for n, p in adapted.named_parameters() if n in before)
    assert frozen
    assert not any(p.requires_grad for p in frozen), "peft trains the whole adapter that becomes active"


def test_a_reference_that_follows_the_model(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0, max_steps=2
    )
    trainer.train()
    own, reference = (dict(m.named_parameters()) for m in (trainer.model, trainer.ref_model))
    assert all(torch.equal(own[name], reference[name]) for name in own)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 4: column 'rejected' is missing or null"),
        ({"prompt": "a", "chosen": " b", "rejected": " b"}, "line 4: chosen and rejected are equal"),
        ({"prompt": "a", "chosen": " b", "rejected": 7}, "line 4: column 'rejected' must hold text, not int"),
        (
            {"prompt": "a", "chosen": " b", "rejected": [{"role": "user", "content": "c"}]},
            "line 4: prompt and rejected",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = LocatedRows([*pairs(3), row], [f"prefs.jsonl line {at}" for at in range(1, 5)])
    with pytest.raises(DataError, match=message):
        trainer_of(tmp_path, rows=rows)


def test_a_reference_of_one_answer_alone_is_refused(tmp_path: Path) -> None:
    rows = [{**row, "ref_rejected_logps": -1.0} for row in pairs(2)]
    with pytest.raises(DataError, match=r"has the column 'ref_rejected_logps' without 'ref_chosen_logps'"):
        trainer_of(tmp_path, rows=rows)


def test_a_prompt_that_fills_the_window_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = {"prompt": "cat " * 70, "chosen": " b", "rejected": " c"}
    rows = LocatedRows([*pairs(3), long], [f"prefs.jsonl line {at}" for at in range(1, 5)])
    trainer = trainer_of(tmp_path, rows=rows)
    assert len(trainer.train_dataset) == 3
    assert "dropped 1 of 4 rows" in caplog.text
    assert "max_length=64: prefs.jsonl line 4" in caplog.text
    with pytest.raises(DataError, match=r"prefs\.jsonl line 4: a prompt with an answer has 72 tokens"):
        trainer_of(tmp_path, rows=rows, truncation_mode="error")


def test_a_stream_is_trained_on(tmp_path: Path) -> None:
    wanted = logs_of(trainer_of(tmp_path / "a", train_sampling_strategy="sequential"))
    stream = small.table(pairs()).to_iterable_dataset()
    found = logs_of(trainer_of(tmp_path / "b", rows=stream))
    assert [row["loss"] for row in found] == [row["loss"] for row in wanted]


def test_rows_of_a_stream_that_are_dropped_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt": "cat " * 70, "chosen": " b", "rejected": " c"}
    rows = [row for pair in pairs(6) for row in (pair, long)]
    wanted = logs_of(trainer_of(tmp_path / "a", rows=pairs(6), train_sampling_strategy="sequential"))
    stream = small.table(rows).to_iterable_dataset()
    trainer = trainer_of(
        tmp_path / "b", rows=stream, eval_dataset=small.table(rows[:2]).to_iterable_dataset()
    )
    found = logs_of(trainer)
    assert [row["loss"] for row in found] == [row["loss"] for row in wanted]
    message = (
        "dropped 6 of the first 12 rows of the stream (train dataset): they have a prompt that fills max"
    )
    assert caplog.text.count(message) == 1, "in several passes, once"
    trainer.evaluate()
    assert "dropped 1 of the first 2 rows of the stream (eval dataset)" in caplog.text
    with pytest.raises(
        DataError, match=r"row 1: a prompt with an answer has 72 tokens, more than max_length=64"
    ):
        trainer_of(tmp_path / "c", rows=stream, truncation_mode="error").train()


def test_neither_the_model_itself_nor_a_name_is_a_reference(tmp_path: Path) -> None:
    model = small.model()
    with pytest.raises(ConfigError, match="cannot be the same object"):
        trainer_of(tmp_path, model, model)
    with pytest.raises(ConfigError, match=r"ref_model='a/name': must be a model: .*from_pretrained"):
        trainer_of(tmp_path, model, "a/name")


WAYS: dict[str, dict[str, Any]] = {
    "copied": {},
    "precomputed": {"precompute_ref_log_probs": True},
    "moving": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "adapter": {"lora": True},
    "further": {"lora": True, "adapted": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_cut_ends_with_the_same_bits(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every way to have a reference: weights and reports, cut between two reports."""
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    options = dict(WAYS[way])
    lora, adapted = options.pop("lora", False), options.pop("adapted", False)

    def made(name: str, steps: int) -> DPOTrainer:
        model, config = small.model(), None
        if lora:
            peft = pytest.importorskip("peft")
            config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        if adapted:
            model, config = moved(peft.get_peft_model(model, config)), None
        given = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "max_steps": 6, **options}
        trainer = trainer_of(tmp_path / name, model, peft_config=config, **given)
        trainer.args.max_steps = 6
        if steps < 6:
            trainer.add_callback(StopAfter(steps))
        return trainer

    whole = made("whole", 6)
    whole.train()
    made("cut", 3).train()
    resumed = made("cut", 6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    own, other = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in other)
    if whole.ref_model is not None:
        own, other = resumed.ref_model.state_dict(), whole.ref_model.state_dict()
        assert all(torch.equal(own[name], other[name]) for name in other)
    logs = [[row for row in t.state.log_history if "loss" in row] for t in (resumed, whole)]
    assert logs[0] == logs[1]


class StopAfter(TrainerCallback):
    """Ends a run after some updates."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self._steps


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("label_smoothing", {"label_smoothing": 0.1}),
        ("discopop_tau", {"discopop_tau": 0.1}),
        ("f_alpha_divergence_coef", {"f_alpha_divergence_coef": 0.3, "f_divergence_type": "forward_kl"}),
        ("f_divergence_type", {"f_divergence_type": "forward_kl", "loss_type": "sft"}),
        ("ld_alpha", {"ld_alpha": 0.4, "loss_type": "sft"}),
        ("ref_model_sync_steps", {"ref_model_sync_steps": 64}),
        ("ref_model_mixup_alpha", {"ref_model_mixup_alpha": 0.9}),
        ("precompute_ref_batch_size", {"precompute_ref_batch_size": 4}),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*has no effect"):
        DPOConfig("unused", use_cpu=True, **options)
