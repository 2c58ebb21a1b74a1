"""Optimizers by name: each learns, each repeats its bits, the rest is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.docs.support_table import SECTIONS
from tests.optim.helpers import Net, decay_groups
from torch import nn

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ConfigError, MissingDependencyError, ModelError
from windlass.optim.groups import arranged
from windlass.optim.registry import OPTIMIZERS, make_optimizer, optimizer_factory

TORCHS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
# These make no update at first, or move all weights by the learning rate whatever the gradient.
PLANS: dict[str, dict[str, Any]] = {"schedule_free_radam": {"learning_rate": 0.05}}


def build_optimizer(model: nn.Module, plan: OptimizerPlan) -> torch.optim.Optimizer:
    cls, kwargs = optimizer_factory(plan)
    return make_optimizer(arranged(model, cls, decay_groups(model, plan.weight_decay)), cls, kwargs)


def trained(name: str, steps: int = 30, **plan: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final parameters of a linear regression."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
    chosen = {"learning_rate": 1e-2, **PLANS.get(name, {}), **plan}
    optimizer = build_optimizer(model, OptimizerPlan(name=name, weight_decay=0.01, **chosen))
    losses = []
    for _ in range(steps):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_each_optimizer_learns_and_repeats_its_bits(name: str) -> None:
    try:
        with torch.compiler.set_stance("force_eager"):  # torchao's compile each shape for many seconds
            (losses, parameters), (again, others) = trained(name), trained(name)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    assert losses[-1] < 0.9 * losses[0]
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


# It is an option of `optim_args`, there are two, as in Adafactor, or none, for which bitsandbytes has 0 in Lion; and of
# Muon's first group it is that of Muon.
OTHER_EPSILON = (
    "adagrad",
    "rmsprop",
    "adafactor",
    "galore_adafactor",
    "adalomo",
    "lion",
    "paged_lion",
    "muon",
)
NO_BETAS = "rmsprop_bnb_8bit"  # bitsandbytes keeps the one average of RMSprop there


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_each_has_the_averages_and_the_epsilon_of_the_configuration(name: str) -> None:
    plan = OptimizerPlan(name=name, learning_rate=0.05, weight_decay=0.01, betas=(0.81, 0.82), epsilon=0.0007)
    try:
        group = build_optimizer(nn.Sequential(nn.Linear(4, 4)), plan).param_groups[0]
    except MissingDependencyError as error:
        pytest.skip(str(error))
    if "betas" in group and name != NO_BETAS:
        assert tuple(group["betas"][:2]) == plan.betas
    if "eps" in group and not name.startswith(OTHER_EPSILON):
        assert group["eps"] == plan.epsilon


class Weights(nn.Module):
    """A model in which one kind of parameter is missing, as adapters have no biases and only biases may be trained."""

    def __init__(self, trained: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32, dtype=dtype) for _ in range(2)])
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith(trained))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.float().square().mean()


VARIANTS = [
    *((name, {}, torch.float32) for name in OPTIMIZERS),
    ("adamw_anyprecision", {"use_kahan_summation": "True"}, torch.bfloat16),
    ("adamw_anyprecision", {"bf16_stochastic_round": "True"}, torch.bfloat16),
    ("stable_adamw", {"kahan_sum": "True"}, torch.bfloat16),
    ("adafactor", {}, torch.bfloat16),
]


@pytest.mark.parametrize("trained", ["weight", "bias"])
@pytest.mark.parametrize(("name", "options", "dtype"), VARIANTS)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_each_optimizer_trains_a_model_whose_other_group_is_empty(
    name: str, options: dict[str, str], dtype: torch.dtype, trained: str
) -> None:
    torch.manual_seed(0)
    model = Weights(trained, dtype)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        optimizer = build_optimizer(
            model, OptimizerPlan(name=name, learning_rate=0.5, weight_decay=0.01, options=options)
        )
        with torch.compiler.set_stance("force_eager"):
            for _ in range(8):
                model(torch.randn(4, 32, dtype=dtype)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    for parameter, start in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, start) == (not parameter.requires_grad)


def test_every_name_of_transformers_is_built_or_refused() -> None:
    arguments = pytest.importorskip("transformers.training_args")
    assert {member.value for member in arguments.OptimizerNames} <= SECTIONS["optim"].keys()


def test_the_configuration_honours_what_is_built_and_nothing_else() -> None:
    assert {name for name, row in SECTIONS["optim"].items() if row.status == "honoured"} == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", TORCHS)
def test_class_and_arguments_are_those_of_transformers(name: str, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), optim=name, learning_rate=3e-4, adam_beta2=0.95, use_cpu=True
    )
    cls, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    ours, our_kwargs = optimizer_factory(OptimizerPlan(name=name, learning_rate=3e-4, betas=(0.9, 0.95)))
    assert ours.__name__ == cls.__name__
    assert our_kwargs == kwargs


@pytest.mark.parametrize("name", sorted(SECTIONS["optim"].keys() - OPTIMIZERS.keys()))
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"optim='{name}': is (not built yet|gone).*optimizers=\("):
        optimizer_factory(OptimizerPlan(name=name))


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'adamw_torch'"):
        optimizer_factory(OptimizerPlan(name="adamw_troch"))


def test_options_arrive_as_values_of_their_type() -> None:
    _, kwargs = optimizer_factory(OptimizerPlan(name="sgd", options={"momentum": "0.9", "nesterov": "True"}))
    assert kwargs == {"lr": 5e-5, "momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"momentun": "0.9"}, "optim_args.momentun='0.9': sgd takes momentum, dampening, nesterov"),
        ("sgd", {"momentum": "fast"}, "must be a number"),
        ("rmsprop", {"centered": "maybe"}, "must be true or false"),
        ("adamw_torch", {"weight_decay": "0.1"}, "set the weight_decay argument instead"),
        ("adafactor", {"lr": "1"}, "set the learning_rate argument instead"),
        # What would end in an error, or in NaN, in an update, or train nothing.
        ("grokadamw", {"lamb": "nan"}, "optim_args.lamb='nan': must be a number"),
        ("ademamix", {"t_alpha": "0"}, "optim_args.t_alpha='0': must be at least 1"),
        ("ademamix", {"t_beta3": "5", "beta1": "0"}, "needs a beta1 and a beta3 above 0"),
        ("adafactor", {"clip_threshold": "0"}, "must be above 0"),
        ("galore_adafactor", {"decay_rate": "0.8"}, "must be at most 0"),
        ("schedule_free_adamw", {"weight_lr_power": "-1"}, "must be at least 0"),
        ("muon", {"ns_steps": "200"}, "must be at least 1 and below 100"),
        ("stable_adamw", {"max_lr": "0", "decouple_lr": "True"}, "must be above 0"),
    ],
)
def test_options_that_do_not_belong_are_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optimizer_factory(OptimizerPlan(name=name, options=options))
    assert message in str(caught.value)


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ModelError, match="no parameter that requires gradients"):
        build_optimizer(Net().requires_grad_(False), OptimizerPlan())


def test_the_fused_kernel_is_used_where_it_exists_and_left_out_where_not() -> None:
    plan = OptimizerPlan(name="adamw_torch_fused")
    assert build_optimizer(nn.Linear(2, 2), plan).defaults["fused"] is True
    strange = build_optimizer(nn.Linear(2, 2, device="meta"), plan)
    assert not strange.defaults["fused"]
    sliced, turned = nn.Linear(2, 2), nn.Linear(2, 3)
    sliced.weight = nn.Parameter(torch.ones(4, 4)[:2, :2])
    turned.weight = nn.Parameter(torch.ones(2, 3).T)
    assert not build_optimizer(sliced, plan).defaults["fused"], (
        "the kernel would read what lies between its rows"
    )
    assert build_optimizer(turned, plan).defaults["fused"]


def test_what_brings_its_own_parameters_is_handed_on() -> None:
    model = nn.Linear(2, 2)
    from_generator = make_optimizer(model.parameters(), torch.optim.AdamW, {"fused": True})
    from_groups = make_optimizer([{"params": model.parameters()}], torch.optim.AdamW, {"fused": True})
    from_names = make_optimizer(model.named_parameters(), torch.optim.AdamW, {"fused": True})
    for optimizer in (from_generator, from_groups, from_names):
        held = optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))


def test_a_class_that_takes_the_model_gets_it() -> None:
    class TakesModel(torch.optim.SGD):
        def __init__(self, model: nn.Module, lr: float) -> None:
            super().__init__(model.parameters(), lr=lr)

    model = nn.Linear(2, 2)
    assert make_optimizer(model, TakesModel, {"lr": 0.1}).param_groups[0]["params"][0] is model.weight


def test_an_empty_group_is_kept() -> None:
    optimizer = make_optimizer(
        decay_groups(nn.Linear(2, 2, bias=False), 0.1), torch.optim.AdamW, {"lr": 0.1, "fused": True}
    )
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
