"""The loss of a plain Trainer without logits: equal to the model's own, and left to it if logits are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.lean_cases import losses, model_of, train
from torch import nn

from windlass import Trainer, TrainerCallback
from windlass.callbacks.run_record import read_record
from windlass.dist.sharded import whole

pytest.importorskip("transformers")

from tests.trainer.lean_cases import FAMILIES

_ROUNDING = 1e-6  # transformers computes most losses in single precision


def _decision(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    assert record is not None
    return dict(record.get("loss", {}))


def _same(one: Trainer, other: Trainer, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(losses(one), losses(other), rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_models_own_loss(family: str, tmp_path: Path) -> None:
    lean = train(tmp_path / "lean", family)
    assert _decision(tmp_path / "lean")["without_logits"] is True
    _same(lean, train(tmp_path / "own", family, lean_loss=False), _ROUNDING)
    assert _decision(tmp_path / "own") == {"without_logits": False, "reason": "lean_loss=False"}


@pytest.mark.parametrize("family", ["causal", "experts", "masked"])
def test_smoothing(family: str, tmp_path: Path) -> None:
    lean = train(tmp_path / "lean", family, label_smoothing_factor=0.1)
    assert _decision(tmp_path / "lean")["without_logits"] is True
    _same(lean, train(tmp_path / "own", family, label_smoothing_factor=0.1, lean_loss=False), _ROUNDING)


def test_mixed_precision(tmp_path: Path) -> None:
    options = {"bf16": True, "gradient_checkpointing": True}
    runs = [
        train(tmp_path / str(lean), model=model_of("causal", torch.float32), lean_loss=lean, **options)
        for lean in (True, False)
    ]
    assert _decision(tmp_path / "True")["without_logits"] is True
    torch.testing.assert_close(losses(runs[0]), losses(runs[1]), rtol=1e-3, atol=0)


class ReadsOutputs(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        assert outputs.logits.shape[-1] == 48
        return (loss, outputs) if return_outputs else loss


class OwnStep(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        outputs = model(**self._prepare_inputs(inputs))
        assert outputs.logits.shape[-1] == 48
        return super().training_step(model, inputs, num_items_in_batch)


def _own_loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


class Seen:
    """A hook that reads logits."""

    def __init__(self) -> None:
        self.shapes: set[int] = set()

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        self.shapes.add(logits.shape[-1])


def _hooked(of_head: bool) -> tuple[nn.Module, Seen]:
    model, seen = model_of("causal"), Seen()
    (model.lm_head if of_head else model).register_forward_hook(seen)
    return model, seen


@pytest.mark.parametrize("of_head", [True, False])
def test_a_hook_that_reads_logits_gets_them(of_head: bool, tmp_path: Path) -> None:
    model, seen = _hooked(of_head)
    train(tmp_path, model=model)
    assert seen.shapes == {48}
    assert "hook of tests.trainer.test_without_logits" in _decision(tmp_path)["reason"]


def test_a_hook_of_all_modules_gets_logits(tmp_path: Path) -> None:
    shapes = set()

    def see(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(module, nn.Linear):
            shapes.add(outputs.shape[-1])

    handle = nn.modules.module.register_module_forward_hook(see)
    try:
        train(tmp_path)
    finally:
        handle.remove()
    assert 48 in shapes
    assert "all modules" in _decision(tmp_path)["reason"]


class HooksLater(TrainerCallback):
    def __init__(self) -> None:
        self.seen = Seen()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            kwargs["model"].register_forward_hook(self.seen)


def test_a_hook_that_comes_later_gets_logits_from_then_on(tmp_path: Path) -> None:
    hooks = HooksLater()
    later = train(tmp_path / "later", callbacks=[hooks])
    assert hooks.seen.shapes == {48}
    _same(later, train(tmp_path / "own", lean_loss=False), _ROUNDING)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": ReadsOutputs}, "compute_loss"),
        ({"compute_loss_func": _own_loss}, "compute_loss_func"),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, "compiled as a whole"),
    ],
    ids=["compute_loss", "function", "compiled"],
)
def test_logits_are_made_for_what_reads_them(options: Any, reason: str, tmp_path: Path) -> None:
    train(tmp_path, **options)
    found = _decision(tmp_path)
    assert found["without_logits"] is False
    assert reason in found["reason"]


def test_a_step_of_the_scripts_own_keeps_its_outputs(tmp_path: Path) -> None:
    _same(train(tmp_path / "lean", kind=OwnStep), train(tmp_path / "own", lean_loss=False), _ROUNDING)
    assert _decision(tmp_path / "lean")["without_logits"] is True


def test_blocks_may_be_compiled(tmp_path: Path) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "eager", "torch_compile_blocks": True}
    models = [model_of("causal", num_hidden_layers=2) for _ in range(2)]
    try:
        lean = train(tmp_path / "lean", model=models[0], **options)
        own = train(tmp_path / "own", model=models[1], lean_loss=False, **options)
    finally:
        torch.compiler.reset()
    assert _decision(tmp_path / "lean")["without_logits"] is True
    _same(lean, own, _ROUNDING)


def test_a_model_with_another_loss_keeps_it(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    class Penalised(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            if outputs.loss is not None:
                outputs.loss = outputs.loss + 0.1 * outputs.logits.square().mean()
            return outputs

    torch.manual_seed(0)
    model = Penalised(model_of("causal").config).double()
    train(tmp_path, model=model)
    assert "the model itself" in _decision(tmp_path)["reason"]


def test_a_narrow_head_makes_its_logits(tmp_path: Path) -> None:
    train(tmp_path, model=model_of("causal", hidden_size=64))
    assert _decision(tmp_path) == {}


@pytest.mark.parametrize("lean", [True, False])
def test_a_resumed_run_keeps_the_decision_and_the_bits(lean: bool, tmp_path: Path) -> None:
    options = {"model": None, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path, lean_loss=lean, **options)
    resumed = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)  # by default True
    assert _decision(tmp_path)["without_logits"] is lean
    _same(whole, resumed)


def test_a_head_that_an_adapter_trains_as_a_whole(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    runs = []
    for lean in (True, False):
        torch.manual_seed(0)
        model = peft.get_peft_model(model_of("causal"), config).double()
        runs.append(train(tmp_path / str(lean), model=model, lean_loss=lean))
    assert _decision(tmp_path / "True")["without_logits"] is True
    _same(*runs, _ROUNDING)


def test_an_adapter_on_the_head_keeps_the_models_loss(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    train(tmp_path, model=peft.get_peft_model(model_of("causal"), config))
    assert "not a plain linear layer" in _decision(tmp_path)["reason"]


@pytest.mark.dist
def test_several_ranks_equal_one(tmp_path: Path) -> None:
    on_ranks(2, main, tmp_path)


# --- what each rank runs ----------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "ddp, experts": {"family": "experts"},
        "fsdp, tied": {"family": "tied", "fsdp": True, "fsdp_config": {"version": 2}},
        "fsdp, pairs": {"family": "pairs", "fsdp": True, "fsdp_config": {"version": 2}},
    }
    for name, options in cases.items():
        # Two ranks with one micro-batch each see the rows of one process with two.
        runs = {}
        for lean in (True, False):
            family = options.get("family", "causal")
            rest = {key: value for key, value in options.items() if key != "family"}
            out = folder / f"{name} {lean}"
            trainer = train(
                out, family, model=model_of(family), gradient_accumulation_steps=1, lean_loss=lean, **rest
            )
            trainer.accelerator.wait_for_everyone()
            runs[lean] = losses(trainer), [whole(p.detach()) for p in trainer.model.parameters()]
            record = read_record(out)
            assert record is not None
            assert record["loss"]["without_logits"] is lean, name
        torch.testing.assert_close(runs[True], runs[False], rtol=1e-6, atol=1e-6, msg=name)
