"""`windlass.utils` and its siblings: scripts' imports work with the name of the library replaced, or say why not."""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils as peer
import pytest
import torch
from tests.versions import needs
from torch import nn

import windlass
import windlass.utils as ours
from windlass.compat.refused_names import WHY
from windlass.compat.state import AcceleratorState
from windlass.config.parallel.sources import from_environment
from windlass.core.errors import ConfigError


@pytest.fixture(autouse=True)
def stateless() -> Iterator[None]:
    """Some of these ask which process they are in; nothing of it outlives them."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


PEER_NAMES = sorted(
    name
    for name in dir(peer)
    if not name.startswith("_") and not isinstance(getattr(peer, name), types.ModuleType)
)
BUILT = {*ours.__all__} - {"logging"}
LEFT_OUT = set(WHY)
SIBLINGS = ["state", "logging", "local_sgd", "tracking", "big_modeling", "hooks", "optimizer", "scheduler"]


@needs("accelerate", "1.10", "older ones have other names")
def test_every_name_of_the_peer_is_there_or_refused() -> None:
    assert set(PEER_NAMES) <= BUILT | LEFT_OUT, set(PEER_NAMES) - BUILT - LEFT_OUT
    assert not BUILT & LEFT_OUT


@pytest.mark.parametrize("name", sorted(BUILT))
def test_names_resolve_and_are_documented(name: str) -> None:
    thing = getattr(ours, name)
    assert isinstance(thing, str) or (thing.__doc__ or "").strip(), name


@pytest.mark.parametrize("name", ["MegatronLMDummyDataLoader", "load_fsdp_model", "WEIGHTS_NAME"])
def test_refused_names_say_why(name: str) -> None:
    with pytest.raises(ImportError, match=rf"windlass\.utils has no {name}: \w+"):
        importlib.import_module("windlass.utils").__getattr__(name)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = ours.nothing_of_the_kind


@pytest.mark.parametrize("name", SIBLINGS)
def test_sibling_modules(name: str) -> None:
    module = importlib.import_module(f"windlass.{name}")
    assert getattr(windlass, name) is module
    theirs = importlib.import_module(f"accelerate.{name}")
    public = {
        n
        for n in vars(theirs)
        if getattr(vars(theirs)[n], "__module__", "") == theirs.__name__ and n[0] != "_"
    }
    known = {*vars(module), *BUILT, *NOT_IN_SIBLINGS.get(name, ())}
    assert public <= known, f"windlass.{name} has no {sorted(public - known)}"


# What scripts do not import from there: helpers of that library's own.
NOT_IN_SIBLINGS = {
    "state": {"do_nothing", "SharedDict", "ThreadLocalSharedDict", "is_initialized"},
    "optimizer": {"patch_optimizer_step", "move_to_device"},
    "hooks": {"CpuOffloadHook"},
}


@pytest.mark.parametrize("name", ["dataclasses", "operations", "random", "memory", "modeling", "offload"])
def test_submodules(name: str) -> None:
    module = importlib.import_module(f"windlass.utils.{name}")
    for public in module.__all__:
        assert getattr(module, public) is getattr(ours, public)
    theirs = importlib.import_module(f"accelerate.utils.{name}")
    defined = {n for n, v in vars(theirs).items() if getattr(v, "__module__", "") == theirs.__name__}
    elsewhere = {"TensorInformation", "convert_outputs_to_fp32"}
    assert defined & BUILT <= {*module.__all__, *elsewhere}
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = module.nothing_of_the_kind


def test_top_level_names_of_the_peer() -> None:
    names = {n for n, v in vars(accelerate).items() if n[0] != "_" and not isinstance(v, types.ModuleType)}
    assert names <= set(windlass.__all__)


@needs("accelerate", "1.10", "older ones return numbers")
@pytest.mark.parametrize("word", ["yes", "On", "1", "n", "FALSE", "0"])
def test_words_of_consent(word: str) -> None:
    for to_bool in (True, False):
        assert ours.str_to_bool(word, to_bool) == peer.str_to_bool(word, to_bool)
        assert type(ours.str_to_bool(word, to_bool)) is type(peer.str_to_bool(word, to_bool))
    with pytest.raises(ValueError, match="maybe"):
        ours.str_to_bool("maybe")


def test_variables_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_TEST_A", "1")
    with ours.patch_environment(windlass_test_a=2, windlass_test_b=3):
        monkeypatch.setenv("WINDLASS_TEST_D", "4")
        assert (os.environ["WINDLASS_TEST_A"], os.environ["WINDLASS_TEST_B"]) == ("2", "3")
        assert ours.get_int_from_env(["WINDLASS_TEST_C", "WINDLASS_TEST_B"], 0) == 3
    assert os.environ["WINDLASS_TEST_A"] == "1"
    assert "WINDLASS_TEST_B" not in os.environ
    assert os.environ["WINDLASS_TEST_D"] == "4", "what the body set itself stays"
    with ours.clear_environment():
        assert not os.environ
    assert ours.parse_flag_from_env("WINDLASS_TEST_A")
    assert not ours.parse_flag_from_env("WINDLASS_TEST_B")

    @ours.purge_accelerate_environment
    def leaves_traces() -> None:
        os.environ["ACCELERATE_TRACE"] = "1"

    leaves_traces()
    assert "ACCELERATE_TRACE" not in os.environ


@pytest.mark.parametrize("name", sorted(n for n in BUILT if n.startswith("is_") and n.endswith("_available")))
def test_availability_is_a_yes_or_no(name: str) -> None:
    assert isinstance(getattr(ours, name)(), bool)


def test_availability_is_the_peers_on_this_machine() -> None:
    for name in (
        "cuda",
        "xpu",
        "datasets",
        "transformers",
        "deepspeed",
        "pytest",
        "triton",
        "torchvision",
    ):
        assert getattr(ours, f"is_{name}_available")() == bool(getattr(peer, f"is_{name}_available")()), name


@pytest.mark.parametrize("operation", [">", ">=", "==", "!=", "<=", "<"])
def test_versions_compare_as_the_peers(operation: str) -> None:
    for version in ("1.0", torch.__version__.split("+")[0], "99.0"):
        assert ours.is_torch_version(operation, version) == peer.is_torch_version(operation, version)
    assert ours.compare_versions("numpy", operation, "2.0") == peer.compare_versions(
        "numpy", operation, "2.0"
    )
    for own in ("windlass", "windlass-trainer"):  # also from a source tree without metadata
        assert ours.compare_versions(own, operation, windlass.__version__) == (
            operation in (">=", "==", "<=")
        )
    with pytest.raises(ValueError, match="must be one of"):
        ours.compare_versions("numpy", "~", "2.0")


def test_wrappers_come_off() -> None:
    inner = nn.Linear(2, 2)
    assert ours.extract_model_from_parallel(nn.DataParallel(inner)) is inner
    compiled = torch.compile(inner)
    assert ours.is_compiled_module(compiled)
    assert ours.extract_model_from_parallel(compiled) is compiled
    assert ours.extract_model_from_parallel(compiled, keep_torch_compile=False) is inner
    replicated = nn.DataParallel(inner)
    training = torch.compile(replicated, backend="eager")
    saved = ours.extract_model_from_parallel(training)
    assert ours.is_compiled_module(saved)
    assert saved._orig_mod is inner
    assert training._orig_mod is replicated  # and goes on as it was
    nested = nn.Sequential(nn.DataParallel(inner))
    assert ours.extract_model_from_parallel(nested, recursive=True)[0] is inner
    assert not ours.model_has_dtensor(inner)


@needs("accelerate", "1.10", "older ones have other names")
def test_children_before_parents() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    assert ours.get_module_children_bottom_up(model) == peer.get_module_children_bottom_up(model)
    pairs = ours.get_module_children_bottom_up(model, return_fqns=True)
    assert pairs == peer.get_module_children_bottom_up(model, return_fqns=True)


def test_tensors_go_to_a_file_and_come_back(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)}
    ours.save(tensors, tmp_path / "x.safetensors")
    found = ours.load(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert ours.load(tmp_path / "x.safetensors", "meta")["a"].device.type == "meta"


def test_shared_memory_is_kept_once() -> None:
    weight = torch.arange(9.0).reshape(3, 3)
    kept = ours.clean_state_dict_for_safetensors(
        {"a": weight, "b": weight, "c": weight.t(), "d": torch.empty(0)}
    )
    assert sorted(kept) == ["a", "c", "d"]
    assert torch.equal(kept["c"], weight.t())
    assert all(t.is_contiguous() for t in kept.values())


def test_a_first_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path))
    path = ours.write_basic_config("bf16")
    assert path == tmp_path / "default_config.yaml"
    from accelerate.commands.config import load_config_from_file

    read: Any = load_config_from_file(str(path))
    assert (read.mixed_precision, read.num_processes, read.use_cpu) == ("bf16", 1, True)
    assert ours.write_basic_config() is False
    with pytest.raises(ConfigError, match="fp7"):
        ours.write_basic_config("fp7")


def test_small_things() -> None:
    assert [ours.convert_bytes(n) for n in (10, 2048, 5e9)] == [
        peer.convert_bytes(n) for n in (10, 2048, 5e9)
    ]
    assert ours.get_pretty_name(nn.Linear(1, 1)) == peer.get_pretty_name(nn.Linear(1, 1))
    assert ours.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"c": 2, "b": 1}}
    assert ours.recursive_getattr(nn.Linear(3, 1), "weight.shape") == torch.Size([1, 3])
    assert ours.convert_outputs_to_fp32(lambda: {"x": torch.ones(1).half()})()["x"].dtype == torch.float32
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert ours.is_port_in_use(listener.getsockname()[1])


def test_a_bar_on_the_main_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(ours.tqdm([1, 2, 3])) == [1, 2, 3]
    assert "3/3" in capsys.readouterr().err
    with pytest.raises(ValueError, match="main_process_only"):
        ours.tqdm(True, [1])


@needs("accelerate", "1.10", "older ones have other names")
def test_availability_takes_the_arguments_of_the_peer() -> None:
    names = [n for n in vars(peer) if n.startswith("is_") and n.endswith("_available")]
    for name in names:
        theirs = inspect.signature(getattr(peer, name)).parameters
        ours_takes = inspect.signature(getattr(ours, name)).parameters
        assert set(theirs) <= set(ours_takes), name
    assert not ours.is_torch_xla_available(check_is_tpu=True)
    assert not ours.is_npu_available(check_device=True)
    assert ours.is_bnb_available("99.0") == bool(peer.is_bnb_available("99.0"))
    assert ours.is_mps_available("1.12") == bool(peer.is_mps_available("1.12"))
    with pytest.raises(ValueError, match="both True"):
        ours.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_the_notebook_callback_has_two_names() -> None:
    from windlass.utils.notebook import NotebookProgressCallback

    assert NotebookProgressCallback is windlass.NotebookProgressCallback


def test_reading_weights_on_one_process_is_chosen_by_the_variables_of_accelerate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "")  # restored afterwards, also if it was absent
        monkeypatch.delenv(name)

    def chosen() -> dict[str, Any]:
        return {key: setting.value for key, setting in from_environment(os.environ).items()}

    ours.enable_fsdp_ram_efficient_loading()
    assert chosen() == {"strategy": "fsdp", "fsdp.cpu_ram_efficient_loading": True}
    ours.disable_fsdp_ram_efficient_loading()
    assert chosen() == {"strategy": "fsdp", "fsdp.cpu_ram_efficient_loading": False}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    ours.enable_fsdp_ram_efficient_loading()
    assert os.environ["ACCELERATE_USE_FSDP"] == "false"
