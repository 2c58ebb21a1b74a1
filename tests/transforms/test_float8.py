"""Linear layers in float8: which are converted, what they compute, and that weights stay in their own dtype."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import on_ranks
from torch import Tensor, nn

from windlass import Accelerator, Trainer, TrainingArguments
from windlass.checkpoint.weights import save_weights
from windlass.compat.plugins import AORecipeKwargs
from windlass.config.plan import Float8Plan
from windlass.core.errors import CheckpointError, ConfigError
from windlass.transforms.float8 import apply_float8
from windlass.utils.other import clean_state_dict_for_safetensors

pytest.importorskip("torchao")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def network(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def converted(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"]


class Special(nn.Linear):
    """A layer with a product of its own, as quantised ones have."""


def test_ends_and_sizes_that_do_not_fit_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = network(32, 32, 32, 24, 32, 32, 32)
    model.insert(2, Special(32, 32))
    names, parameters = list(model.state_dict()), list(model.parameters())
    with caplog.at_level("INFO", logger="windlass"):
        apply_float8(model, Float8Plan(emulate=True))
        apply_float8(model, Float8Plan(emulate=True))
    assert converted(model) == ["1", "5"]
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("float8")]
    assert "2 of 7 linear layers" in line
    for part in ("2 first or last", "1 of another class", "2 with a size that is not a multiple of 16"):
        assert part in line


def test_the_script_selects_layers() -> None:
    model = network(32, 32, 32, 24)
    apply_float8(model, Float8Plan(emulate=True, selects=lambda module, name: name in ("0", "2")))
    assert converted(model) == ["0"]


@pytest.mark.parametrize("sizes", [(24, 24, 24, 24), (32, 32, 32), (32,)])
def test_a_model_without_such_layers_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="mixed_precision='fp8': Sequential has no linear layer that can"):
        apply_float8(network(*sizes), Float8Plan(emulate=True))


def rounded(x: Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> Tensor:
    """`x` in float8 and back, with one scale for all elements along `dims`."""
    scale = torch.finfo(dtype).max / x.abs().amax(dims, keepdim=True).double()
    return (x * scale.float()).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(
        dtype
    ).float() / scale.float()


def test_weights_that_a_script_wrapped_for_a_gather_are_all_saved(tmp_path: Path) -> None:
    """Such a tensor claims the address 0, as every other does."""
    library = pytest.importorskip("torchao.float8")
    model, plain = network(32, 32, 32), network(32, 32, 32)
    config = library.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    library.convert_to_float8_training(model, config=config)
    state = model.state_dict()
    save_weights(tmp_path, {**state, "tied": state["0.weight"].detach()})
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved.pop(name), weight) for name, weight in plain.state_dict().items())
    assert saved == {}
    assert clean_state_dict_for_safetensors(state).keys() == state.keys()


def test_weights_without_bits_of_their_own_are_refused_before_the_first_update(tmp_path: Path) -> None:
    library, model = pytest.importorskip("torchao.quantization"), Network()
    library.quantize_(model.layers[0], library.Int8WeightOnlyConfig())
    model.layers[0].requires_grad_(False)
    args = TrainingArguments(str(tmp_path), max_steps=2, save_steps=2, report_to="none", use_cpu=True)
    run = Trainer(model, args, train_dataset=rows())
    with pytest.raises(CheckpointError, match=r"layers\.0\.product\.weight, a Int8Tensor"):
        run.train()
    assert run.state.global_step == 0


def test_a_product_is_that_of_the_rounded_factors() -> None:
    model = network(32, 32, 32, 32)
    layer, x = model[1], torch.randn(8, 32)
    expected = rounded(x, torch.float8_e4m3fn, (0, 1)) @ rounded(layer.weight, torch.float8_e4m3fn, (0, 1)).T
    apply_float8(model, Float8Plan(emulate=True))
    torch.testing.assert_close(model[1](x), expected + layer.bias, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_are_close_to_those_without_it(recipe: str, mixed: bool) -> None:
    model, x = network(32, 32, 32, 32), torch.randn(7, 32)  # a number of rows that the kernels do not take

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            y = model[1](torch.tanh(model[0](x)))
            assert y.dtype == (torch.bfloat16 if mixed else torch.float32)
            loss = model[2](torch.tanh(y)).float().square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    plain = gradients()
    apply_float8(model, Float8Plan(recipe=recipe, emulate=True))
    ours = gradients()
    assert {g.dtype for g in ours} == {torch.float32}
    assert not torch.equal(ours[2], plain[2])
    for one, other in zip(ours, plain, strict=True):
        assert (one - other).norm() <= 0.1 * other.norm()


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_two_processes_have_the_losses_of_one(layout: str, tmp_path: Path) -> None:
    one = train(tmp_path / "one", 8)
    sharding = {"fsdp": True, "fsdp_config": {"transformer_cls_names_to_wrap": ["Block"]}}
    two, _ = on_ranks(2, partial(train, **(sharding if layout == "sharded" else {})), tmp_path / "two", 4)
    assert two == pytest.approx(one, rel=5e-3)
    saved, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert {t.dtype for t in saved.values()} == {torch.float32}
    assert all((saved[name] - alone[name]).norm() < 2e-2 * alone[name].norm() for name in alone)


def rows() -> list[dict[str, Tensor]]:
    return [
        {"x": x, "labels": x.flip(0)} for x in torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    ]


def trainer(folder: Path, **options: Any) -> Trainer:
    args = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to="none", use_cpu=True,
        save_steps=2, fp8=True, fp8_config={"emulate": True}, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return Trainer(Network(), args, train_dataset=rows())


def test_a_run_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.train()
    assert str(whole.accelerator.fp8_backend) == "AO"
    assert whole.accelerator.mixed_precision == "fp8"
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert converted(again.model) == ["layers.1.product", "layers.2.product"]
    ours, theirs = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # What was saved is a plain model's.
    Network().load_state_dict(load_file(tmp_path / "checkpoint-4" / "model.safetensors"))


@pytest.mark.parametrize(
    "extra",
    [{"activation_checkpointing": True}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}],
)
def test_other_transforms_compute_the_same(extra: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name, options in (("plain", {}), ("both", extra)):
        run = trainer(tmp_path / name, **options)
        run.train()
        found.append([row["loss"] for row in run.state.log_history if "loss" in row])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_options_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8 import Float8LinearConfig

    given = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    handler = AORecipeKwargs(given, lambda module, name: name in ("0", "1"))
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
    assert accelerator.mixed_precision == "fp8"
    assert accelerator.fp8_enabled
    assert accelerator.ao_recipe_handler is handler
    model = network(32, 32, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert converted(accelerator.unwrap_model(prepared)) == ["0", "1"]
    evaluated, frozen = network(32, 32, 32, 32), network(32, 32, 32, 32).requires_grad_(False)
    accelerator.prepare_model(evaluated, evaluation_mode=True)
    accelerator.prepare(frozen)
    assert converted(evaluated) == converted(frozen) == [], "only what is trained"
    before = model[0].weight.clone()
    accelerator.backward(prepared(torch.randn(4, 32)).square().mean())
    optimizer.step()
    assert not torch.equal(before, model[0].weight)
    assert type(model[0].weight) is nn.Parameter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "fp8"}, "cpu has no matrix products in float8"),
        ({"kwargs_handlers": [AORecipeKwargs(recipe="rowwise")]}, "has no effect, for float8 is off"),
        (
            {"mixed_precision": "fp8", "kwargs_handlers": [AORecipeKwargs(recipe="row")]},
            "recipe='row'\\): must be one of tensorwise|must be one of tensorwise",
        ),
        (
            {"mixed_precision": "fp8", "kwargs_handlers": [AORecipeKwargs("rowwise")]},
            "must be a torchao.float8",
        ),
        ({"mixed_precision": "fp8", "deepspeed_plugin": {}}, "deepspeed_plugin"),
    ],
)
def test_what_a_loop_cannot_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kernels_compute_what_emulation_computes(recipe: str) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device with float8")
    x = torch.randn(40, 64, device="cuda")
    found = []
    for emulate in (False, True):
        model = network(64, 64, 64, 64).cuda()
        apply_float8(model, Float8Plan(recipe=recipe, emulate=emulate))
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


# --- what each rank runs ----------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.product(x))


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Any, labels: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x.float() - labels).square().mean()}


def train(folder: Path, rows: int, **options: Any) -> list[float]:
    """Losses of three updates of 8 rows; saves the model."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = [{"x": x, "labels": x.flip(0)} for x in torch.randn(32, 32, generator=generator)]
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=rows, learning_rate=0.5, optim="sgd", logging_steps=1,
        report_to="none", use_cpu=True, save_strategy="no", fp8=True,
        fp8_config={"emulate": True, "recipe": "rowwise_with_gw_hp"},
        **options,
    )  # fmt: skip
    trainer = Trainer(Network(), args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    assert {type(block.product).__name__ for block in trainer.model.layers[1:3]} == {"Float8Linear"}
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
