"""Models that are divided already when they are placed, and drawn models in each way to spread them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.small import Net, rows, settings
from tests.transforms import drawn_layers_ranks, drawn_spread_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from windlass import Accelerator, Trainer, TrainingArguments
from windlass.config.plan import DistPlan, PipelinePlan, ShardPlan
from windlass.core.errors import ConfigError, ModelError
from windlass.dist.gang import Gang, current
from windlass.dist.imagined import imagined_job
from windlass.transforms.strategies import spread
from windlass.transforms.strategy import Strategy


@pytest.mark.dist
def test_a_model_that_was_divided_before_is_refused_with_the_way_out(tmp_path: Path) -> None:
    on_ranks(2, main, tmp_path)


@pytest.mark.parametrize("order", [-float("inf"), -1.0, 0.0, 1.0, 2.0, float("inf")])
def test_a_norm_counts_the_zeros_that_a_sparse_gradient_leaves_out(order: float) -> None:
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1, 1, 2])).square().sum().backward()
    assert table.weight.grad is not None
    found = Strategy(table).norm_of_order([table.weight.grad], order)
    torch.testing.assert_close(found, torch.nn.utils.get_total_norm([table.weight.grad.to_dense()], order))


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("ranks", "first", "last"),
    [(2, 0, 20), *(pytest.param(n, 20, 150, marks=pytest.mark.slow) for n in (2, 3))],
)
def test_drawn_models_train_as_in_one_process(kind: str, ranks: int, first: int, last: int) -> None:
    on_ranks(ranks, drawn_spread_ranks.main, kind, first, last)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "first", "last"),
    [(2, 0, 12), *(pytest.param(n, 12, 60, marks=pytest.mark.slow) for n in (2, 3, 4))],
)
def test_drawn_models_whose_layers_are_divided_train_as_in_one_process(
    ranks: int, first: int, last: int
) -> None:
    on_ranks(ranks, drawn_layers_ranks.main, first, last)


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        (DistPlan(), {"max_norm": 1.0}, r"model\.0\.max_norm=1\.0: rewrites the rows that a forward reads"),
        (DistPlan(strategy="fsdp", shard=ShardPlan()), {"max_norm": 1.0}, "train with one process"),
        (
            DistPlan(strategy="fsdp", shard=ShardPlan()),
            {"sparse": True},
            r"model\.0\.sparse=True: .*build it with sparse=False",
        ),
    ],
)
def test_embeddings_that_ranks_would_train_otherwise_are_refused(
    plan: DistPlan, options: dict[str, Any], words: str
) -> None:
    model = nn.Sequential(nn.Embedding(4, 2, **options), nn.Linear(2, 1))
    with imagined_job(2), pytest.raises(ConfigError, match=words):
        spread(model, plan, current(), torch.device("cpu"))
    assert spread(model, DistPlan(), Gang(), torch.device("cpu")).module is model


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("config", SimpleNamespace(is_encoder_decoder=True), "has an encoder and a decoder"),
        ("peft_config", {"default": SimpleNamespace(is_prompt_learning=True)}, "learns prompts"),
        ("weight", nn.Parameter(torch.empty(1, device="meta")), "is on the meta device on some processes"),
    ],
)
def test_a_model_that_has_no_stages_is_refused(name: str, value: object, words: str) -> None:
    model = nn.Linear(1, 1)
    setattr(model, name, value)
    with pytest.raises(ConfigError, match=words):
        spread(model, DistPlan(pipeline=PipelinePlan(2)), Gang(), torch.device("cpu"))


# --- what each rank runs ----------------------------------------------------------------------------------------------


TENSOR_PARALLEL = "divided among the processes by tensor parallelism"


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def linear() -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})


def net() -> nn.Module:
    model = Net()
    for name, part in model.named_children():
        if isinstance(part, nn.Linear):
            parallelize_module(model, init_device_mesh("cpu", (2,)), {name: ColwiseParallel()})
    return model


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    said = error_of(lambda: accelerator.prepare(linear()))
    assert TENSOR_PARALLEL in said, said
    for number, sharded in enumerate((None, True)):
        args = TrainingArguments(**settings(folder / str(number), fsdp=sharded, max_steps=1))
        said = error_of(lambda args=args: Trainer(net(), args, train_dataset=rows(8)).train())  # type: ignore[misc]
        assert "model='Net'" in said or "model=Net" in said, said
        assert TENSOR_PARALLEL in said, said
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    said = error_of(lambda: accelerator.prepare(model))
    assert "was divided with fsdp=True and stays so; set that, or build it again" in said, said
    for plan in (DistPlan(strategy="fsdp", shard=ShardPlan(), expert=2), DistPlan(pipeline=PipelinePlan(2))):
        said = error_of(lambda plan=plan: spread(model, plan, current(), torch.device("cpu")))  # type: ignore[misc]
        assert "was divided with fsdp=True and stays so; set that, or build it again" in said, said
    uneven = nn.Sequential(nn.Linear(4, 4 + accelerator.process_index))
    uneven.tp_plan = {"0": "colwise"}  # type: ignore[assignment]
    for plan in (DistPlan(tensor=2), DistPlan(expert=2), DistPlan(pipeline=PipelinePlan(2))):
        with pytest.raises(ModelError, match="differs from rank 0's"):
            spread(uneven, plan, current(), torch.device("cpu"))
    assert torch.distributed.is_initialized()
