"""Which layers a plan divides, and which models are refused. What ranks compute is in `tests/trainer/`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.trainer.context_cases import model
from torch import nn

from windlass.core.errors import ConfigError
from windlass.core.mesh import Mesh
from windlass.core.world import World
from windlass.dist.gang import Gang
from windlass.transforms.expert_plan import chosen_experts, expert_layers, number_of_experts
from windlass.transforms.tensor_parallel import TensorDivision


class Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up, self.scale = nn.Parameter(torch.zeros(4, 2, 2)), nn.Parameter(torch.zeros(()))


def net(plan: Any, experts: int = 4) -> nn.Module:
    made = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": Experts(experts)})])})
    made.ep_plan = plan
    return made


PLAN = {"layers.*.experts": "ep_dispatch_experts", "layers.*.experts.up": "grouped_gemm"}


def test_a_plan_names_layers_and_their_parameters() -> None:
    wrapped = nn.ModuleDict({"inner": net(PLAN)})
    [(path, (layer, names))] = chosen_experts(wrapped, 2).items()
    assert (path, type(layer), names) == ("layers.0.experts", Experts, ("up",))
    assert [number_of_experts(each) for each in expert_layers(wrapped)] == [4]
    assert expert_layers(nn.Linear(2, 2)) == []


def test_a_plan_as_transformers_before_5_18_has_it() -> None:
    older = {
        "layers.*.gate": "ep_router",
        "layers.*.experts": "moe_tp_experts",
        "layers.*.experts.up": "grouped_gemm",
    }
    made = net(None)
    del made.ep_plan
    made._ep_plan = older
    [(path, (layer, names))] = chosen_experts(made, 2).items()
    assert (path, type(layer), names) == ("layers.0.experts", Experts, ("up",))
    assert expert_layers(made) == [layer]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_models_of_transformers_have_plans(name: str) -> None:
    pytest.importorskip("transformers")
    found = chosen_experts(model(name), 2)
    assert len(found) == (1 if name.startswith("deepseek") else 2)
    assert {len(names) for _, names in found.values()} == {4 if name == "gpt_oss" else 2}


@pytest.mark.parametrize(
    ("plan", "experts", "ranks", "fix"),
    [
        (None, 4, 2, "has no plan for dividing experts"),
        ({"blocks.*": "ep_dispatch_experts"}, 4, 2, "none of its layers has a name of its ep_plan"),
        ({"layers.*.experts": "ep_dispatch_experts"}, 4, 2, "has no parameters of its plan there"),
        (PLAN, 3, 2, "has no num_experts that is the first size of its parameters"),
        (PLAN, 4, 3, "ep_size=3: must divide the experts of layers.0.experts, which are 4"),
    ],
)
def test_what_cannot_be_divided_is_refused(plan: Any, experts: int, ranks: int, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        chosen_experts(net(plan, experts), ranks)


def test_a_tensor_gang_divides_the_experts_of_each_rank() -> None:
    assert list(chosen_experts(net(PLAN), 2, 2)) == ["layers.0.experts"]
    fix = r"ep_size=2: times tp_size=4 must divide the experts of layers.0.experts, which are 4"
    with pytest.raises(ConfigError, match=fix):
        chosen_experts(net(PLAN), 2, 4)
    uneven = net(PLAN)
    uneven.tp_plan = {"layers.*.other": "colwise"}
    uneven.layers[0]["other"] = nn.Linear(2, 2)
    gang = Gang(World(0, 4, 0, 4), Mesh(expert=2, tensor=2), members=(0, 1))
    styles = {
        path: style for path, (_, style) in TensorDivision(uneven, gang, torch.device("cpu")).chosen.items()
    }
    assert styles == {"layers.0.other": "colwise", "layers.0.experts": "moe_tp_experts"}


def test_adapters_on_experts_are_refused() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model("mixtral"), peft.LoraConfig(r=2, target_parameters=["experts.down_proj"])
    )
    with pytest.raises(ConfigError, match="adapters on experts are not built together with ep_size"):
        chosen_experts(adapted, 2)
    assert [number_of_experts(each) for each in expert_layers(adapted)] == [4, 4]
