"""Updates inside the backward on two ranks: gradients are reduced first, and every rank has the same weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.engine.fused_cases import GALORE, Tied, rows, run
from torch import Tensor, nn
from torch.utils.data import DataLoader

from windlass import Accelerator, Lomo
from windlass.core.errors import ConfigError, ModelError
from windlass.dist.sharded import is_sharded, whole

RANK = int(os.environ.get("RANK", 0))
SHARDED: dict[str, Any] = {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}}
WAYS: dict[str, dict[str, Any]] = {"replicated": {}, "sharded": SHARDED}
# The third is the first with a projection that is made again.
STEPS = 3
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "lomo": ("lomo", {}),
    "accumulated": ("lomo", {"gradient_accumulation_steps": 2}),
    "clipped": ("lomo", {"max_grad_norm": 0.5}),
    "both": ("lomo", {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}),
    "adalomo": ("adalomo", {}),
    "galore": ("galore_adamw", GALORE),
    "galore_adafactor": ("galore_adafactor", GALORE),
    "layer-wise": ("galore_adamw_layerwise", GALORE),
    "8 bits": ("galore_adamw_8bit", GALORE),
    "apollo": ("apollo_adamw", GALORE),
}


def weights(model: nn.Module) -> list[float]:
    return torch.cat([whole(p.detach()).flatten() for p in model.parameters()]).tolist()


def runs(folder: Path) -> dict[str, Any]:
    found = {}
    for way, settings in WAYS.items():
        for name, (optim, changes) in RUNS.items():
            options = {"per_device_train_batch_size": 1, "max_steps": STEPS, **settings, **changes}
            trainer, seen = run(folder / way / name, optim, model=Tied(dropout=0.0), **options)
            assert any(map(is_sharded, trainer.model.parameters())) == (way == "sharded")
            found[f"{way} {name}"] = {"weights": weights(trainer.model), "norms": seen.norms}
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """Weights after six updates, in one run and in two."""
    found = {}
    for way, settings in WAYS.items():
        for optim, changes in (("adalomo", {}), ("galore_adamw_layerwise", GALORE)):
            options = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
            options |= {"per_device_train_batch_size": 1, **settings, **changes}
            options |= {"gradient_accumulation_steps": 2}
            place = folder / way / optim
            clean, _ = run(place / "a", optim, model=Drifting(), max_steps=6, **options)
            run(place / "b", optim, model=Drifting(), max_steps=3, **options)
            again, _ = run(place / "b", optim, model=Drifting(), max_steps=6, resume=True, **options)
            found[f"{way} {optim}"] = [weights(clean.model) == weights(again.model)]
    return found


class Drifting(Tied):
    """Computes with a buffer that each forward changes by the batch of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drift", torch.zeros((), dtype=torch.float64))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.drift = 0.9 * self.drift + 0.1 * input_ids.double().mean()
        loss, logits = super().forward(input_ids, labels)
        return loss * (1 + self.drift), logits


class Unequal(Tied):
    """Leaves the second block out, on the second rank alone."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        if RANK == 1:
            self.blocks = self.blocks[:1]
        return super().forward(input_ids, labels)


def refusals(folder: Path) -> dict[str, str]:
    found = {}
    try:
        run(folder / "unequal", "lomo", model=Unequal(), per_device_train_batch_size=1)
    except ModelError as error:
        found["unequal"] = str(error)
    try:
        run(folder / "buckets", "lomo", ddp_bucket_cap_mb=1, per_device_train_batch_size=1)
    except ConfigError as error:
        found["buckets"] = str(error)
    return found


def own_loop(optimizer: Any) -> list[float]:
    """A loop on prepared objects, with half of each batch on each rank."""
    accelerator, model = Accelerator(cpu=True), Tied(dropout=0.0)
    loader: Any = DataLoader(rows(12), batch_size=1)  # type: ignore[arg-type]
    model, made, loader = accelerator.prepare(model, optimizer(model.parameters(), lr=0.05), loader)
    for batch in loader:
        accelerator.backward(model(**batch)[0])
        made.step()
        made.zero_grad()
    return weights(model)


def main(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = {"runs": runs(folder / "runs"), "resumed": resumed(folder / "resumed")}
    said["refused"] = refusals(folder / "refused")
    said["loops"] = [own_loop(kind) for kind in (Lomo, torch.optim.SGD)]
    return said


# --- tests ------------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, main, tmp_path_factory.mktemp("fused"))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_are_one_process(tmp_path: Path, ranks: list[dict[str, Any]], way: str, name: str) -> None:
    optim, changes = RUNS[name]
    alone, seen = run(tmp_path, optim, model=Tied(dropout=0.0), max_steps=STEPS, **changes)
    expected = torch.cat([p.detach().flatten() for p in alone.model.parameters()])
    for said in ranks:
        found = said["runs"][f"{way} {name}"]
        torch.testing.assert_close(
            torch.tensor(found["weights"], dtype=torch.float64), expected, rtol=0, atol=1e-11
        )
        assert found["norms"] == pytest.approx(seen.norms, rel=1e-6)


def test_a_stopped_run_ends_with_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for said in ranks:
        assert said["resumed"] == {name: [True] for name in said["resumed"]}
        assert len(said["resumed"]) == 4


def test_a_parameter_that_one_rank_does_not_reach_is_named_on_all(ranks: list[dict[str, Any]]) -> None:
    for said in ranks:
        assert "blocks.1.mlp.0.weight" in said["refused"]["unequal"]


def test_options_of_buckets_are_refused(ranks: list[dict[str, Any]]) -> None:
    for said in ranks:
        assert "ddp_bucket_cap_mb=1" in said["refused"]["buckets"]


def test_a_loop_with_lomo_is_one_with_sgd(ranks: list[dict[str, Any]]) -> None:
    for said in ranks:
        ours, theirs = said["loops"]
        assert ours == pytest.approx(theirs, abs=1e-12)
    assert ranks[0]["loops"] == ranks[1]["loops"]
