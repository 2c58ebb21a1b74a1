"""Configuration objects of a user-owned loop: the names and defaults scripts know, and what is refused."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks

from windlass import utils
from windlass.compat.plugin_engines import DeepSpeedPlugin
from windlass.compat.plugin_fsdp import FullyShardedDataParallelPlugin
from windlass.compat.plugins import (
    AORecipeKwargs,
    DistributedDataParallelKwargs,
    ParallelismConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from windlass.config.loop_options import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from windlass.config.values import stated
from windlass.core.errors import ConfigError
from windlass.core.world import World
from windlass.dist.gang import join, leave

peers = pytest.importorskip("accelerate.utils.dataclasses")
Peer = pytest.importorskip("accelerate", minversion="1.10").ParallelismConfig

WORDS = [
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "LoggerType",
    "PrecisionType",
    "RNGType",
    "SageMakerDistributedType",
]
# With fields of our own.
LARGER = ["AORecipeKwargs", "TorchTensorParallelConfig"]
OBJECTS = [
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
]
REFUSED = [
    "BnbQuantizationConfig",
    "FP8RecipeKwargs",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "TERecipeKwargs",
]


def defaults(kind: type) -> dict[str, Any]:
    """Fields and defaults of a dataclass; words by their value, since the enumerations are different classes."""

    def plain(spec: dataclasses.Field[Any]) -> Any:
        made = spec.default_factory
        value = made() if made is not dataclasses.MISSING else spec.default
        return value.value if isinstance(value, enum.Enum) else value

    return {spec.name: plain(spec) for spec in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_those_of_scripts(name: str) -> None:
    ours, theirs = getattr(utils, name), getattr(peers, name)
    assert {m.name: m.value for m in ours} == {m.name: m.value for m in theirs}
    first = next(iter(ours))
    assert first.value in ours
    assert "nothing of the kind" not in ours
    assert first in ours.list()


@pytest.mark.parametrize("name", OBJECTS)
def test_fields_and_defaults_are_those_of_scripts(name: str) -> None:
    assert defaults(getattr(utils, name)) == defaults(getattr(peers, name))


@pytest.mark.parametrize("name", LARGER)
def test_scripts_find_their_fields(name: str) -> None:
    ours, theirs = defaults(getattr(utils, name)), defaults(getattr(peers, name))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {field: ours[field] for field in theirs} == theirs


def test_parallelism_has_the_peers_fields_and_axes() -> None:
    further = {"pp_size": None, "pp_handler": None, "ep_size": None}
    assert defaults(ParallelismConfig) == defaults(Peer) | further
    names = {n for n, v in vars(Peer).items() if isinstance(v, property)}
    for sizes in ({}, {"dp_shard_size": 4}, {"dp_replicate_size": 2, "dp_shard_size": 3, "cp_size": 2}):
        ours, theirs = ParallelismConfig(**sizes), Peer(**sizes)
        assert {n: getattr(ours, n) for n in names} == {n: getattr(theirs, n) for n in names}


def test_every_object_of_the_peer_is_named() -> None:
    theirs = {n for n, v in vars(peers).items() if isinstance(v, type) and dataclasses.is_dataclass(v)}
    assert theirs - {"TensorInformation"} <= {*OBJECTS, *LARGER, *REFUSED}


# They do with torch what the floors above do when the objects are used.
LEFT_TO_OTHERS = {
    "DistributedDataParallelKwargs": {"register_comm_hook"},
    "ProfileKwargs": {"build"},
    "FullyShardedDataParallelPlugin": {"set_cpu_offload"},
    "ParallelismConfig": {"to_json"},
}


@pytest.mark.parametrize(
    "name", [*(n for n in OBJECTS if n != "DeepSpeedPlugin"), *LARGER, "ParallelismConfig"]
)
def test_public_methods_are_those_of_scripts(name: str) -> None:
    theirs = Peer if name == "ParallelismConfig" else getattr(peers, name)
    public = {n for n, v in vars(theirs).items() if callable(v) and not n.startswith("_")}
    assert {n for n in public if not hasattr(getattr(utils, name), n)} == LEFT_TO_OTHERS.get(name, set())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_cannot_be_made(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*not built"):
        getattr(utils, name)(1, width=8)


def test_only_what_differs_is_passed_on() -> None:
    assert GradScalerKwargs(init_scale=8.0).to_kwargs() == {"init_scale": 8.0}
    assert GradientAccumulationPlugin(num_steps=3).to_kwargs() == {"num_steps": 3}
    assert InitProcessGroupKwargs().to_kwargs() == {}
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=5)).to_kwargs() == {
        "timeout": timedelta(seconds=5)
    }
    assert TorchDynamoPlugin(backend="inductor", use_regional_compilation=True).to_kwargs() == {
        "backend": "inductor"
    }


def test_what_an_author_said() -> None:
    assert stated(TorchDynamoPlugin(mode="max-autotune")) == {"mode": "max-autotune"}
    assert stated(ParallelismConfig(dp_shard_size=2)) == {"dp_shard_size": 2}
    assert stated(DistributedDataParallelKwargs()) == {}


def test_timeouts_are_the_peers() -> None:
    for backend in ("nccl", "gloo"):
        assert (
            InitProcessGroupKwargs(backend=backend).timeout
            == peers.InitProcessGroupKwargs(backend=backend).timeout
        )


def test_logs_lie_in_the_project() -> None:
    assert ProjectConfiguration("p").logging_dir == "p"
    assert ProjectConfiguration("p", logging_dir="l").logging_dir == "l"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (DistributedDataParallelKwargs(dim=1), "dim"),
        (DistributedDataParallelKwargs(check_reduction=True), "check_reduction"),
        (DistributedDataParallelKwargs(gradient_as_bucket_view="yes"), "gradient_as_bucket_view"),
        (GradScalerKwargs(growth_factor=1.0), "growth_factor"),
        (GradScalerKwargs(backoff_factor=1.0), "backoff_factor"),
        (GradScalerKwargs(init_scale=float("nan")), "init_scale"),
        (GradientAccumulationPlugin(num_steps=0), "num_steps"),
        (DataLoaderConfiguration(split_batches="yes"), "split_batches"),
        (DataLoaderConfiguration(data_seed=-1), "data_seed"),
        (ProfileKwargs(activities=["gpu"]), "activities"),
        (ProfileKwargs(schedule_option={"waits": 1}), "schedule_option"),
        (ProjectConfiguration(total_limit=0), "total_limit"),
        (TorchTensorParallelPlugin(tp_size=2), "tp_size"),
        (ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(True)), "enable_async_tp"),
        (AORecipeKwargs(config="rowwise"), "AORecipeKwargs.config"),
        (DeepSpeedPlugin(enable_msamp=True), "enable_msamp"),
        (FullyShardedDataParallelPlugin(fsdp_version=3), "fsdp_version"),
        (FullyShardedDataParallelPlugin(param_init_fn=print), "param_init_fn"),
        (FullyShardedDataParallelPlugin(state_dict_type="LOCAL_STATE_DICT"), "state_dict_type"),
        (FullyShardedDataParallelPlugin(auto_wrap_policy=lambda m: True), "auto_wrap_policy"),
        (FullyShardedDataParallelPlugin(mixed_precision_policy={"weights": "bf16"}), "mixed_precision_policy"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(options: Any, field: str) -> None:
    (problem,) = options.objections()
    assert field in problem.field


def test_defaults_have_nothing_against_them() -> None:
    for name in (*OBJECTS, *LARGER):
        made = getattr(utils, name)()
        if hasattr(made, "objections"):
            assert not list(made.objections()), name


def test_contradictory_axes_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelismConfig(cp_backend="nccl", sp_backend="torch")
    assert {p.field for p in caught.value.problems} == {
        "ParallelismConfig.cp_backend",
        "ParallelismConfig.sp_backend",
    }
    assert len(list(ParallelismConfig(dp_shard_size=4).objections(processes=2))) == 1


def test_sharding_in_words_numbers_and_enumerations() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    for said in ("full_shard", 1, "1", fsdp.ShardingStrategy.FULL_SHARD):
        assert FullyShardedDataParallelPlugin(sharding_strategy=said).settings() == {
            "sharding_strategy": "full_shard"
        }
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward="false",
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_POST,
        cpu_offload=fsdp.CPUOffloadPolicy(),
        state_dict_type=fsdp.StateDictType.SHARDED_STATE_DICT,
        transformer_cls_names_to_wrap="BertLayer, BertPooler",
    )
    assert plugin.settings() == {
        "fsdp_version": "2",
        "reshard_after_forward": False,
        "backward_prefetch": "backward_post",
        "cpu_offload": True,
        "state_dict_type": "sharded",
        "transformer_cls_names_to_wrap": ("BertLayer", "BertPooler"),
    }
    plugin.set_state_dict_type("full_state_dict")
    assert plugin.state_dict_type == "FULL_STATE_DICT"
    assert plugin.settings()["state_dict_type"] == "full"


@pytest.mark.parametrize(
    ("field", "said", "canonical"),
    [
        ("backward_prefetch", 2, "backward_post"),
        ("reshard_after_forward", 2, "shard_grad_op"),
        ("reshard_after_forward", "TRUE", True),
        ("auto_wrap_policy", "size_based_wrap", "size"),
        ("auto_wrap_policy", "3", "none"),
    ],
)
def test_numbers_in_a_plugin_are_those_of_pytorchs_enumerations(
    field: str, said: Any, canonical: Any
) -> None:
    """In a launch file they mean ranks and layers."""
    assert FullyShardedDataParallelPlugin(**{field: said}).settings() == {field: canonical}


def test_fields_are_documented_by_the_table_of_settings() -> None:
    from windlass.config.parallel.table import KEYS

    text = str(FullyShardedDataParallelPlugin.__doc__)
    assert f"cpu_offload (Any, default None): {KEYS['fsdp.cpu_offload'].doc}" in text
    fields = [field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)]
    assert not [name for name in fields if name not in text]


def test_fields_continue_the_attributes_that_a_docstring_has() -> None:
    text = str(ProfileKwargs.__doc__)
    assert text.count("Attributes:") == 1
    assert text.index("\n    on_trace_ready: ") < text.index("\n    output_trace_dir (")


def test_sharding_with_pytorchs_own_objects() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Linear})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=layers, mixed_precision_policy=policy)
    assert plugin.settings() == {
        "auto_wrap_policy": "transformer",
        "transformer_cls_names_to_wrap": ("Linear",),
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
    }
    sized = functools.partial(size_based_auto_wrap_policy, min_num_params=10)
    assert FullyShardedDataParallelPlugin(auto_wrap_policy=sized).settings()["min_num_params"] == 10


def test_pytorchs_defaults_for_whole_states_are_mapped_with_a_warning(said: list[str]) -> None:
    pytest.importorskip("torch")
    from torch.distributed.fsdp import FullStateDictConfig

    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    plugin = FullyShardedDataParallelPlugin(state_dict_config=config, optim_state_dict_config=config)
    assert plugin.settings() == {}
    for option in ("offload_to_cpu", "rank0_only"):
        assert len([m for m in said if f".state_dict_config.{option}=False is accepted as True" in m]) == 1


def test_ignored_modules_get_their_names() -> None:
    nn = pytest.importorskip("torch").nn
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plugin = FullyShardedDataParallelPlugin(ignored_modules=[model[1]])
    assert plugin.ignored_names(model.named_modules()) == ("1",)
    assert plugin.settings() == {}
    for given in (model[1], iter([model[1]])):
        plugin = FullyShardedDataParallelPlugin(ignored_modules=given)
        assert [plugin.ignored_names(model.named_modules()) for _ in range(2)] == [("1",)] * 2
        assert plugin.settings() == {}


def test_ignored_modules_are_given_by_name_too() -> None:
    plugin = FullyShardedDataParallelPlugin(ignored_modules=["head", "embed"])
    assert plugin.settings() == {"ignored_modules": ("head", "embed")}
    assert plugin.ignored_names([("head", object())]) == ()


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ([1], "must be modules of the model, names of modules, or a regular expression"),
        (
            ["head", torch.nn.ReLU()],
            "must be modules of the model, names of modules, or a regular expression",
        ),
        ("(", r"is not a regular expression \(missing \)"),
    ],
)
def test_what_are_no_modules_is_refused(given: Any, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"1 problem(.|\n)*Plugin.ignored_modules=.*: {fix}"):
        FullyShardedDataParallelPlugin(ignored_modules=given).settings()


def test_an_unknown_type_of_state_dict_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="state_dict_type='whole': must be one of full, sharded"):
        FullyShardedDataParallelPlugin().set_state_dict_type("whole")


@pytest.mark.parametrize(("field", "value"), [("zero_stage", 5), ("hf_ds_config", "/nowhere.json")])
def test_the_configuration_of_a_deepspeed_plugin_names_what_cannot_be_read(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"DeepSpeedPlugin.{field}={value!r}: (must be|is neither)"):
        _ = DeepSpeedPlugin(**{field: value}).deepspeed_config


def test_replication_becomes_a_plan() -> None:
    from windlass.config.parallel.parallel_plan import plan_parallel
    from windlass.config.parallel.sources import from_plugins
    from windlass.core.world import World

    options = DistributedDataParallelKwargs(
        comm_hook="power_sgd", comm_state_option={"start_powerSGD_iter": 2}, gradient_as_bucket_view=True
    )
    settings = from_plugins({"ddp_kwargs": options})
    assert settings.keys() == {"ddp.comm_hook", "ddp.comm_options"}
    plan = plan_parallel(settings, World(0, 2, 0, 2)).dist
    assert (plan.comm_hook, plan.comm_options) == ("power_sgd", {"start_powerSGD_iter": 2})


SIZES = {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "4", "PARALLELISM_CONFIG_TP_SIZE": "2"}


def test_the_layout_reads_the_variables_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setenv(name, value)
    for ours in (ParallelismConfig(), ParallelismConfig.from_env()):
        theirs = Peer()
        assert (ours.dp_shard_size, ours.tp_size, ours.total_size) == (4, 2, 8)
        assert (theirs.dp_shard_size, theirs.tp_size, theirs.total_size) == (4, 2, 8)
        assert type(ours.tp_handler).__name__ == type(theirs.tp_handler).__name__
        assert not list(ours.objections(processes=8))
    assert ParallelismConfig(dp_shard_size=1, tp_size=1).total_size == 1
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "many")
    with pytest.raises(ConfigError, match=r"PARALLELISM_CONFIG_DP_SHARD_SIZE='many'"):
        ParallelismConfig()


def test_the_layout_reads_the_variable_of_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "WINDLASS_PARALLEL", '{"mesh.shards": [2, "--dp_shard_size"], "compile.mode": ["default", "-"]}'
    )
    assert (ParallelismConfig().dp_shard_size, TorchDynamoPlugin().mode) == (2, "default")


def test_compilation_reads_the_variables_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BACKEND": "inductor", "MODE": "max-autotune", "USE_FULLGRAPH": "1"}.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    ours, theirs = TorchDynamoPlugin(), peers.TorchDynamoPlugin()
    assert ours.to_dict() == theirs.to_dict()
    assert (
        ours.to_kwargs()
        == theirs.to_kwargs()
        == {"backend": "inductor", "mode": "max-autotune", "fullgraph": True}
    )
    explicit = {"backend": "eager", "mode": "default", "fullgraph": False}
    assert TorchDynamoPlugin(**explicit).to_kwargs() == {"backend": "eager"}


def test_a_mesh_needs_the_type_of_its_devices() -> None:
    with pytest.raises(ConfigError, match="device_type"):
        ParallelismConfig(dp_shard_size=2).get_device_mesh()


@pytest.mark.dist
def test_meshes_beside_accelerate(tmp_path: Path) -> None:
    on_ranks(4, main, tmp_path / "meeting")


# --- what each rank runs ----------------------------------------------------------------------------------------------


def axes(mesh: Any, names: list[str]) -> dict[str, list[int]]:
    return {name: mesh[name].mesh.tolist() for name in names}


def main(meeting: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(World(rank, world, rank, world), torch.device("cpu"), 60, init_method=f"file://{meeting}")
    for sizes, joint in (
        ({"dp_shard_size": 4}, ["dp", "dp_cp", "dp_shard_cp"]),
        ({"dp_replicate_size": 4}, ["dp", "dp_cp"]),
        ({"tp_size": 4}, []),
        ({"cp_size": 4}, ["dp_cp", "dp_shard_cp"]),
        ({"dp_shard_size": 2, "tp_size": 2}, ["dp", "dp_cp", "dp_shard_cp"]),
    ):
        ours, theirs = ParallelismConfig(**sizes), Peer(**sizes)  # type: ignore[arg-type]
        mesh, peer = ours.get_device_mesh("cpu"), theirs.get_device_mesh("cpu")
        assert mesh.mesh_dim_names == peer.mesh_dim_names
        names = [*mesh.mesh_dim_names, *joint]
        assert axes(mesh, names) == axes(peer, names)
        assert ours.get_device_mesh() is ours.get_device_mesh("cpu") is mesh
        for name in names:  # as long as those of the job
            backend = mesh[name].get_group()._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=60), name
    assert ParallelismConfig().build_device_mesh("cpu") is None
    assert ParallelismConfig(sp_size=2).build_device_mesh("cpu") is None
    leave()
