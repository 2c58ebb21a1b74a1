"""User-owned loops in one process: against hand-written ones, against the real accelerate, and where they are wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
from tests.accelerator import loop_cases
from tests.accelerator.loop_cases import make, regression, tiny
from tests.said import listening
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from windlass import Accelerator, LossTerms
from windlass.config.loop_options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from windlass.core.errors import ConfigError, ModelError


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """The real one keeps its settings in singletons."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def equal(found: nn.Module, want: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found.parameters(), want.parameters(), strict=True))


def loop(accelerator: Any, epochs: int = 3, clip: float | None = 0.3, accumulate: bool = True) -> nn.Module:
    """A loop that either library can run."""
    torch.manual_seed(2)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    prepared = accelerator.prepare(DataLoader(regression(), batch_size=8), schedule, model, optimizer)
    data, schedule, model, optimizer = prepared
    for _ in range(epochs):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [1, 3])
def test_the_same_bits_as_accelerate(steps: int) -> None:
    theirs = loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps))
    assert equal(loop(make(False, gradient_accumulation_steps=steps)), theirs)


def test_bf16_gives_the_same_bits_as_accelerate() -> None:
    def run(accelerator: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        model = accelerator.prepare(nn.Linear(4, 4))
        out = model(torch.ones(2, 4))
        accelerator.backward(out.sum())
        return out.detach(), model.weight.grad

    theirs = run(accelerate.Accelerator(cpu=True, mixed_precision="bf16"))
    found = run(make(False, mixed_precision="bf16"))
    assert found[0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))


def test_four_lines_make_a_loop_run_anywhere() -> None:
    torch.manual_seed(0)
    model, data = tiny(), DataLoader(regression(), batch_size=8)
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(own(x), y).backward()
        optimizer.step()

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for x, y in data:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
    assert equal(model, own)


def test_a_gan_is_the_hand_written_one() -> None:
    found = loop_cases.gan(False)
    torch.manual_seed(6)
    makes, judges = tiny(out=6, inputs=3), tiny()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (makes, judges)]
    for _ in range(2):
        for real, _ in DataLoader(regression(), batch_size=loop_cases.BATCH):
            loop_cases.gan_step(Tensor.backward, makes, judges, *optimizers, real, real[:, :3].sin())
    want = {f"{i}.{k}": v for i, m in enumerate((makes, judges)) for k, v in m.state_dict().items()}
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_transformers_model_trains_as_with_accelerate() -> None:
    """Its outputs are objects with attributes, under mixed precision too; its schedule comes from the guides."""
    transformers = pytest.importorskip("transformers")

    def run(accelerator: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.BertConfig(vocab_size=32, **shape)
        model = transformers.BertForSequenceClassification(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = transformers.get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=4)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        ids = torch.arange(24).reshape(4, 6)
        for _ in range(4):
            outputs = model(input_ids=ids, labels=torch.tensor([0, 1, 1, 0]))
            accelerator.backward(outputs.loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return outputs.logits.detach(), outputs.loss.detach()

    theirs = run(accelerate.Accelerator(cpu=True, mixed_precision="bf16"))
    found = run(make(False, mixed_precision="bf16"))
    assert found[0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))


# --- what prepare gives -----------------------------------------------------------------------------------------------


def test_objects_come_back_in_order_and_strangers_as_they_are() -> None:
    accelerator, model, stranger = make(False), tiny(), object()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = accelerator.prepare(stranger, optimizer, model, None)
    assert (found[0], found[2], found[3]) == (stranger, model, None)
    assert found[1].optimizer is optimizer
    assert isinstance(found[1], torch.optim.Optimizer)
    assert accelerator.prepare(found[1]) is found[1]
    assert accelerator.prepare(optimizer) is found[1]
    assert accelerator.prepare(model) is model
    with pytest.raises(ConfigError, match="needs one entry for each of the 1 objects"):
        accelerator.prepare(model, device_placement=[True, False])


def test_schedules_can_be_built_on_either_optimizer() -> None:
    accelerator, model = make(False), tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepared, model = accelerator.prepare(optimizer, model)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(prepared, 1, 0.1))
    accelerator.backward(model(torch.ones(1, 6).double()).sum())
    prepared.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_groups_that_are_added_later_are_trained() -> None:
    accelerator, model = make(False), tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))  # type: ignore[index]
    optimizer.add_param_group({"params": list(model[2].parameters())})
    before = model[2].weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 6).double()).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not torch.equal(model[2].weight, before)


@pytest.mark.parametrize(
    ("unit", "updates", "want"), [("loader_batch", 3, 3), ("optimizer_step", 3, 3), (None, 3, 6)]
)
def test_what_a_schedule_counts(unit: str | None, updates: int, want: int) -> None:
    options: dict[str, Any] = {"scheduler_unit": unit} if unit else {"step_scheduler_with_optimizer": False}
    accelerator, model = make(False, gradient_accumulation_steps=2, **options), tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for _ in range(2 * updates):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 6).double()).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert schedule.last_epoch == want
    schedule.step()  # an update is never counted twice
    assert schedule.last_epoch == want + (unit != "optimizer_step")


def test_a_schedule_that_was_not_prepared_is_left_alone() -> None:
    accelerator, model = make(False, gradient_accumulation_steps=4), tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 6).double()).sum())
        optimizer.step()
        schedule.step()
    assert schedule.last_epoch == 1


# --- fp16 -------------------------------------------------------------------------------------------------------------


def half(scale: float = 1024.0) -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=scale)])


def test_an_overflow_skips_the_update_and_its_schedule() -> None:
    accelerator, model = half(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for factor, skipped in ((math.inf, True), (1.0, False)):
        before = model.weight.detach().clone()
        accelerator.backward(model(torch.ones(1, 2)).sum() * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is skipped
        assert torch.equal(model.weight, before) is skipped
    assert schedule.last_epoch == optimizer.updates == 1
    assert accelerator.scaler.get_scale() == 512.0


def test_gradients_that_wait_follow_the_shared_loss_scale() -> None:
    """One model overflows, which changes the scale, between the backward and the step of the other."""
    accelerator = half()
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    prepared = accelerator.prepare(
        first,
        second,
        torch.optim.SGD(first.parameters(), lr=1.0),
        torch.optim.SGD(second.parameters(), lr=1.0),
    )
    before = second.weight.item()
    accelerator.backward(second(torch.ones(1, 1)).sum() * 0.25)
    accelerator.backward(first(torch.ones(1, 1)).sum() * math.inf)
    prepared[2].step()
    prepared[3].step()
    assert prepared[2].step_was_skipped
    assert second.weight.item() == pytest.approx(before - 0.25)


def test_a_backward_after_a_clip_is_unscaled_like_the_first() -> None:
    accelerator, model = half(), nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.gradient_accumulation_steps = 2
    before, weights = model.weight.detach().clone(), (0.5, 0.25)
    with listening() as said:
        for weight in weights:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).sum() * weight)
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
    assert torch.equal(model.weight, before - sum(weights) / 2)
    assert "does not complete its update" in "".join(said)


def test_gradients_are_unscaled_once() -> None:
    accelerator, model = half(), nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[1024.0, 1024.0]]
    accelerator.unscale_gradients(optimizer)
    accelerator.unscale_gradients()
    assert accelerator.clip_grad_norm_(model.parameters(), 10.0).item() == pytest.approx(math.sqrt(2))
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert model.weight.grad.tolist() == [[0.5, 0.5]]
    with pytest.raises(ModelError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_autocast_can_be_told_otherwise() -> None:
    accelerator, x = make(False, mixed_precision="bf16"), torch.ones(2, 2)
    with accelerator.autocast():
        assert (x @ x).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (x @ x).dtype == torch.float32


def test_a_forward_without_gradients_leaves_the_next_one_its_own() -> None:
    accelerator, model = make(False, mixed_precision="bf16"), nn.Linear(2, 1)
    prepared = accelerator.prepare(model)
    with accelerator.autocast():
        with torch.no_grad():
            prepared(torch.ones(1, 2))
        prepared(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_mixed_precision_comes_off_a_model_again() -> None:
    accelerator, model = make(False, mixed_precision="bf16"), nn.Linear(2, 2)
    weight = torch.full((2, 2), 1 + 2**-10)
    model.load_state_dict({"weight": weight, "bias": torch.zeros(2)})
    x = torch.tensor([[1.0, 0.0]])
    rounded = accelerator.prepare(model)(x)
    assert rounded.dtype == torch.float32
    assert rounded[0, 0] == 1.0
    assert copy.deepcopy(model)(x)[0, 0] == 1.0
    exact = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert exact is model
    assert exact(x)[0, 0] == 1 + 2**-10


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_gives_its_exact_forward_back(compiled_first: bool) -> None:
    accelerator = make(False, mixed_precision="bf16")
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2) / 3
    want = model(x)
    if compiled_first:
        prepared = accelerator.prepare(torch.compile(model, backend="eager"))
    else:
        prepared = torch.compile(accelerator.prepare(model), backend="eager")
    assert not torch.equal(prepared(x), want)
    assert list(accelerator.get_state_dict(prepared)) == ["weight", "bias"]
    found = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert found is model
    assert torch.equal(found(x), want)


# --- LossTerms --------------------------------------------------------------------------------------------------------


def test_terms_are_divided_by_the_weight_of_the_update() -> None:
    """Micro-batches of different weight; the first update has nothing to guess by, the second guesses wrong."""
    model = nn.Linear(1, 1, bias=False).double()
    own = copy.deepcopy(model)
    accelerator = make(False, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(own.parameters(), lr=0.1)
    for weights in ((1.0, 5.0), (7.0, 2.0)):
        for weight in weights:
            with accelerator.accumulate(model):
                accelerator.backward(
                    LossTerms(model(torch.ones(1, 1).double()).square().sum() * weight, weight)
                )
                optimizer.step()
                if accelerator.sync_gradients:
                    optimizer.zero_grad()
        own(torch.ones(1, 1).double()).square().sum().backward()
        reference.step()
        reference.zero_grad()
    assert model.weight.item() == pytest.approx(own.weight.item(), rel=1e-14)


def test_a_parameter_of_two_models_is_corrected_and_clipped_once() -> None:
    first, second = nn.Linear(2, 1, bias=False).double(), nn.Linear(2, 1, bias=False).double()
    second.weight = first.weight
    own = copy.deepcopy(first)
    accelerator = make(False, gradient_accumulation_steps=2)
    first, second, optimizer = accelerator.prepare(first, second, torch.optim.SGD([first.weight], lr=0.1))
    reference = torch.optim.SGD(own.parameters(), lr=0.1)
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    for weights in ((1.0, 5.0), (7.0, 2.0)):
        for weight in weights:
            with accelerator.accumulate(first, second):
                accelerator.backward(LossTerms((first(x) + second(x)).square().sum() * weight, weight))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.5)
                optimizer.step()
                optimizer.zero_grad()
        (2 * own(x)).square().sum().backward()
        want = torch.nn.utils.clip_grad_norm_(own.parameters(), 0.5).item()
        assert norm.item() == pytest.approx(want, rel=1e-14)
        reference.step()
        reference.zero_grad()
    assert first.weight.tolist() == [pytest.approx(row, rel=1e-14) for row in own.weight.tolist()]


def test_terms_that_cannot_be_honoured() -> None:
    accelerator, model = make(False, gradient_accumulation_steps=2), nn.Linear(1, 1)
    model = accelerator.prepare(model)
    loss = model(torch.ones(1, 1)).sum()
    with pytest.raises(ModelError, match="put auxiliary terms into the sum"):
        accelerator.backward(LossTerms(loss, 1.0, aux={"balance": loss}))
    with pytest.raises(ModelError, match=r"within `with accelerator\.accumulate"):
        accelerator.backward(LossTerms(loss, 1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        with pytest.raises(ModelError, match="one update was given LossTerms and a plain loss"):
            accelerator.backward(LossTerms(loss, 1.0))


def test_terms_do_not_reach_tensors_of_no_model() -> None:
    accelerator, model, scale = make(False, gradient_accumulation_steps=2), nn.Linear(1, 1), torch.ones(1)
    scale.requires_grad_()
    model, _ = accelerator.prepare(model, torch.optim.SGD([*model.parameters(), scale], lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(LossTerms((model(torch.ones(1, 1)) * scale).sum(), 1.0))
    with (
        accelerator.accumulate(model),
        pytest.raises(ModelError, match=r"1 tensor\(s\) of no prepared model"),
    ):
        accelerator.backward(LossTerms((model(torch.ones(1, 1)) * scale).sum(), 1.0))


# --- wrong from the start ---------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError) as raised:
        Accelerator(
            mixed_precision="fp16",
            gradient_accumulation_steps=2,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=0),
            dataloader_config=DataLoaderConfiguration(split_batches="yes"),  # type: ignore[arg-type]
            kwargs_handlers=[AutocastKwargs(), AutocastKwargs()],
            scheduler_unit="epoch",
            deepspeed_plugins={"a": object()},
            rng_types=["dice"],
        )
    said = str(raised.value)
    for part in (
        "gradient_accumulation_plugin is given too",
        "num_steps",
        "split_batches",
        "AutocastKwargs",
        "scheduler_unit",
        "deepspeed_plugins",
        "dice",
        "ACCELERATE_MIXED_PRECISION",
    ):
        assert part in said, said


def test_the_launchers_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 4)


def test_what_is_refused_names_the_fix() -> None:
    accelerator = make(False)
    with pytest.raises(ConfigError, match="no prepared optimizer updates in the backward"):
        accelerator.backward(torch.ones(()), learning_rate=0.1)
    with pytest.raises(ConfigError, match="is needed to ask for a rank"):
        _ = accelerator.data_parallel_rank
    model = tiny()
    model.hf_device_map = {"0": "cpu", "1": "disk"}  # type: ignore[assignment]
    assert accelerator.verify_device_map(model)


def test_free_memory_lets_go_of_the_scripts_objects() -> None:
    accelerator, model = make(False), tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _ = accelerator.prepare(model, optimizer)
    prepared, again = accelerator.free_memory(prepared, optimizer)
    assert (prepared, again) == (None, None)
    model(torch.ones(1, 6).double()).sum().backward()
    optimizer.step()


def test_objects_of_a_released_accelerator_are_prepared_again() -> None:
    """A library that makes an accelerator for each run prepares what the last one returned."""
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prepared: Any = (model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    for precision in ("bf16", "no", "bf16"):
        accelerator = make(False, mixed_precision=precision)
        prepared = accelerator.prepare(*prepared)
        x, rate, before = torch.rand(1, 6), optimizer.param_groups[0]["lr"], model.weight.detach().clone()
        with torch.autocast("cpu", enabled=precision == "bf16"):
            want = F.linear(x, model.weight, model.bias).float()
        found = prepared[0](x)
        assert torch.equal(found, want)
        accelerator.backward((found**2).sum())
        assert model.weight.grad is not None
        gradient = model.weight.grad.clone()
        prepared[1].step()
        prepared[2].step()
        prepared[1].zero_grad()
        assert torch.equal(model.weight, before - rate * gradient)
        assert optimizer.param_groups[0]["lr"] == rate / 2
        with pytest.raises(ModelError, match=r"call `free_memory\(\)` of that one first"):
            make(False).prepare(prepared[1])
        accelerator.free_memory()


def test_a_compiled_model_is_the_same_model() -> None:
    accelerator = make(False, dynamo_backend="eager")
    model = tiny()
    want = model(torch.ones(1, 6).double())
    assert torch.equal(accelerator.prepare(model)(torch.ones(1, 6).double()), want)
    assert model._compiled_call_impl is not None
    accelerator.unwrap_model(model, keep_torch_compile=False)
    assert model._compiled_call_impl is None
