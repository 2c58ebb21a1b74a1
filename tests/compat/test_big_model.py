"""Models run from the host or the disk: the same numbers, less memory. Compared with accelerate's."""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import utils as reference_utils
from safetensors.torch import save_file
from tests.compat.big_models import IDS, Model, seeded
from tests.dist.launch import run_script
from tests.versions import with_pinned
from torch import nn

from windlass import Accelerator
from windlass.accelerator.offloaded_weights import get_state_dict_offloaded_model
from windlass.checkpoint.stored import load_folder
from windlass.checkpoint.weights import save_weights
from windlass.compat.big_models import (
    attach_hooks,
    auto_device_map,
    big_model,
    checkpoint_loading,
    device_memory,
    model_hooks,
    module_tensors,
    offloaded,
)
from windlass.compat.big_models.auto_device_map import infer_auto_device_map
from windlass.compat.big_models.big_model import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from windlass.compat.big_models.model_hooks import remove_hook_from_submodules
from windlass.compat.big_models.module_tensors import find_tied_parameters
from windlass.core.errors import ConfigError, ModelError

MODULES = (
    big_model, checkpoint_loading, attach_hooks, auto_device_map, device_memory, model_hooks, module_tensors,
    offloaded,
)  # fmt: skip
NAMES = {
    "init_empty_weights", "init_on_device", "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model",
    "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "infer_auto_device_map",
    "attach_layerwise_casting_hooks", "get_balanced_memory", "get_max_memory", "compute_module_sizes",
    "check_device_map", "find_tied_parameters", "retie_parameters", "add_hook_to_module", "remove_hook_from_module",
    "named_module_tensors", "AlignDevicesHook", "CpuOffload", "LayerwiseCastingHook", "align_module_device",
}  # fmt: skip
MAPS: list[dict[str, Any]] = [
    {"": "disk"},
    {"": "cpu", "blocks": "disk"},
    {"": "cpu", "position": "disk", "blocks.1": "disk", "head": "disk"},
    {"embedding": "disk", "position": "cpu", "blocks": "cpu", "norm": "disk", "head": "disk"},
]


def _reference(name: str) -> Any:
    for module in (
        accelerate,
        accelerate.big_modeling,
        accelerate.hooks,
        reference_utils,
        reference_utils.modeling,
    ):
        if hasattr(module, name):
            return getattr(module, name)
    raise AssertionError(name)


@with_pinned("accelerate")
@pytest.mark.parametrize("name", sorted(NAMES))
def test_arguments_and_defaults_are_those_of_the_reference(name: str) -> None:
    ours = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    mine = {key: value.default for key, value in inspect.signature(ours).parameters.items() if key != "_"}
    theirs = {
        k: v.default for k, v in inspect.signature(_reference(name)).parameters.items() if k != "kwargs"
    }
    assert mine == theirs


def _outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("how", [cpu_offload, disk_offload])
def test_offloaded_whole_and_back(how: Any, offload_buffers: bool, tmp_path: Path) -> None:
    model, expected = seeded(), _outputs(seeded())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder = (tmp_path,) if how is disk_offload else ()
    assert how(model, *folder, offload_buffers=offload_buffers) is model
    assert all(param.is_meta for param in model.parameters())
    assert torch.equal(_outputs(model), expected)
    assert torch.equal(_outputs(model), expected), "a second time too"
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in get_state_dict_offloaded_model(model).items()
    )
    remove_hook_from_submodules(model)
    assert torch.equal(_outputs(model), expected)
    assert find_tied_parameters(model) == find_tied_parameters(seeded())
    assert all(param.requires_grad for param in model.parameters())


def test_two_views_of_one_memory_are_offloaded_apart() -> None:
    layer = nn.Linear(3, 3, bias=False)
    layer.register_buffer("turned", layer.weight.data.t())
    expected = layer.turned.clone()
    cpu_offload(layer, "cpu", offload_buffers=True)
    assert torch.equal(get_state_dict_offloaded_model(layer)["turned"], expected)


@pytest.mark.parametrize("places", MAPS)
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_dispatched_outputs_are_those_of_the_whole_model(
    places: dict[str, Any], offload_buffers: bool, tmp_path: Path
) -> None:
    model = seeded()
    dispatch_model(model, places, offload_dir=tmp_path, offload_buffers=offload_buffers)
    assert any(param.is_meta for param in model.parameters())
    assert model.hf_device_map == places
    assert torch.equal(_outputs(model), _outputs(seeded()))
    remove_hook_from_submodules(model)
    assert torch.equal(_outputs(model), _outputs(seeded()))
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


@pytest.mark.parametrize("places", MAPS)
@pytest.mark.parametrize("limit", ["10GB", 200])
def test_an_offloaded_model_is_saved_whole(places: dict[str, Any], limit: Any, tmp_path: Path) -> None:
    model = seeded()
    dispatch_model(model, places, offload_dir=tmp_path / "offload", offload_buffers=True)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.save_model(prepared, tmp_path / "saved", max_shard_size=limit)
    whole, loaded = seeded().state_dict(), seeded()
    for tensor in loaded.state_dict().values():
        tensor.zero_()
    load_folder(tmp_path / "saved", loaded)
    for found in (loaded.state_dict(), accelerator.get_state_dict(prepared)):
        assert found.keys() == whole.keys()
        assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("places", [*MAPS, "auto", "sequential", "balanced_low_0"])
def test_loaded_and_dispatched(places: Any, offload_buffers: bool, tmp_path: Path) -> None:
    full = seeded()
    save_weights(tmp_path, full.state_dict())
    with init_empty_weights():
        model = Model().eval()
    for mine, theirs in zip(model.blocks, full.blocks, strict=True):
        mine.factor.copy_(theirs.factor)
    load_checkpoint_and_dispatch(
        model,
        tmp_path,
        device_map=places,
        max_memory={"cpu": 3000},
        offload_folder=tmp_path / "offload",
        offload_buffers=offload_buffers,
        strict=True,
    )
    assert any(param.is_meta for param in model.parameters())
    assert torch.equal(_outputs(model), _outputs(full))


def test_transformers_models_with_ties(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    llama = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=97, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    t5 = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=97)
    ids = torch.arange(12).reshape(2, 6)
    for kind, config, inputs in (
        (LlamaForCausalLM, llama, {"input_ids": ids}),
        (T5ForConditionalGeneration, t5, {"input_ids": ids, "decoder_input_ids": ids}),
    ):
        torch.manual_seed(0)
        model = kind(config).eval()
        with torch.no_grad():
            expected = model(**inputs).logits
        folder = tmp_path / kind.__name__
        save_weights(_made(folder), model.state_dict())
        with init_empty_weights():
            empty = kind(config).eval()
        options = {"max_memory": {"cpu": 20_000}, "no_split_module_classes": list(model._no_split_modules)}
        theirs = reference_utils.infer_auto_device_map(model, **copy.deepcopy(options))
        assert infer_auto_device_map(empty, **options) == dict(theirs)
        load_checkpoint_and_dispatch(
            empty, folder, "auto", offload_folder=folder / "offload", strict=True, **options
        )
        assert any(param.is_meta for param in empty.parameters())
        with torch.no_grad():
            assert torch.equal(empty(**inputs).logits, expected)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_weights_of_another_model_in_the_folder_are_not_taken(tmp_path: Path) -> None:
    disk_offload(seeded(1), tmp_path)
    assert torch.equal(_outputs(disk_offload(seeded(2), tmp_path)), _outputs(seeded(2)))


def test_a_model_without_weights_takes_those_in_the_folder(tmp_path: Path) -> None:
    disk_offload(seeded(), tmp_path, offload_buffers=True)
    with init_empty_weights():
        empty = Model().eval()
    for mine, theirs in zip(empty.blocks, seeded().blocks, strict=True):
        mine.factor.copy_(theirs.factor)
        mine.shift.copy_(theirs.shift)
    assert torch.equal(_outputs(disk_offload(empty, tmp_path, execution_device="cpu")), _outputs(seeded()))


def test_a_model_on_the_meta_device_is_offloaded_with_the_device_that_it_runs_on() -> None:
    weights = torch.nn.Linear(2, 3).state_dict()
    with init_empty_weights():
        empty = torch.nn.Linear(2, 3)
    with pytest.raises(ConfigError, match="execution_device=None: the model is on the meta device"):
        cpu_offload(empty, state_dict=weights)
    cpu_offload(empty, "cpu", state_dict=weights)
    assert torch.equal(empty(torch.ones(1, 2)), weights["weight"].sum(1)[None] + weights["bias"])


def test_a_model_without_a_parameter_is_offloaded() -> None:
    model = cpu_offload(torch.nn.ReLU())
    assert model(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]


def test_weights_that_are_nowhere(tmp_path: Path) -> None:
    with init_empty_weights():
        empty = Model()
    with pytest.raises(ModelError, match=r"no data for position, embedding\.weight.* and 16 more"):
        disk_offload(empty, tmp_path, execution_device="cpu")
    with pytest.raises(ModelError, match="no data for"):
        cpu_offload(empty, "cpu")


def test_weights_and_buffers_without_data_are_named_where_a_model_is_moved_to_one_device(
    tmp_path: Path,
) -> None:
    seeded_weights = {name: tensor for name, tensor in seeded().state_dict().items() if name != "position"}
    save_weights(tmp_path, seeded_weights)
    with init_empty_weights():
        empty = Model()
    with pytest.raises(ModelError, match="no data for position: load a checkpoint that has them"):
        load_checkpoint_and_dispatch(empty, tmp_path, {"": "cpu"})


def test_a_model_on_one_device_is_moved_there_without_hooks() -> None:
    model = dispatch_model(seeded(), {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert model.hf_device_map == {"": "cpu"}
    forced = dispatch_model(seeded(), {"": "cpu"}, force_hooks=True)
    assert hasattr(forced, "_hf_hook")
    assert torch.equal(_outputs(forced), _outputs(seeded()))


def test_dispatched_models_are_not_moved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("windlass").propagate = True
    model = dispatch_model(seeded(), MAPS[1], offload_dir=tmp_path)
    for move in (model.to, model.cuda):
        with pytest.raises(ModelError, match="cannot be moved or cast"):
            move("cpu")
    remove_hook_from_submodules(model)
    model.to("cpu")
    forced = dispatch_model(seeded(), {"": "cpu"}, force_hooks=True)
    forced.to("cpu")
    assert "is being moved" in caplog.text


def test_a_copy_of_a_dispatched_model_is_moved_alone() -> None:
    model = dispatch_model(seeded(), {"": "cpu"}, force_hooks=True)
    other = copy.deepcopy(model)
    other.to(torch.float64)
    assert model.head.weight.dtype is torch.float32
    assert other.head.weight.dtype is torch.float64


def test_weights_on_disk_are_found_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = disk_offload(seeded(), "offload", execution_device="cpu")
    monkeypatch.chdir("/")
    assert torch.equal(_outputs(model), _outputs(seeded()))


def test_maps_that_cannot_be_honoured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no place for"):
        dispatch_model(seeded(), {"blocks": "cpu"})
    with pytest.raises(ConfigError, match=r"offload_dir.*blocks go to disk"):
        dispatch_model(seeded(), MAPS[1])
    with pytest.raises(ConfigError, match=r"devices \[64\]"):
        dispatch_model(seeded(), {"": 64})
    for words in ("evenly", ["cpu"]):
        with pytest.raises(ConfigError, match="sequential"):
            load_checkpoint_and_dispatch(seeded(), tmp_path, device_map=words)  # type: ignore[arg-type]
    # Before the checkpoint, of which there is none, is looked for.
    for device_map, words in (
        ({"": 64}, r"devices \[64\]"),
        ({"": "gpu"}, r"devices \['gpu'\]"),
        ({"": "cuda:64"}, r"devices \['cuda:64'\]"),
        ({"blocks": "cpu"}, "no place for"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_checkpoint_and_dispatch(seeded(), tmp_path, device_map=device_map)  # type: ignore[arg-type]


def test_a_pipeline_of_models() -> None:
    x = torch.rand(1, 2)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    expected = second(first(x))
    _, hook = cpu_offload_with_hook(first, "cpu")
    _, last = cpu_offload_with_hook(second, "cpu", prev_module_hook=hook)
    assert torch.equal(second(first(x)), expected)
    last.offload()
    last.remove()
    hook.remove()
    assert not hasattr(first, "_hf_hook")


MEMORY = """
import sys, torch
from torch import nn
from windlass.compat.big_models.big_model import load_checkpoint_and_dispatch
from windlass.metrics.stage_memory import process_peak_bytes
from windlass.compat.big_models.big_model import init_empty_weights

with init_empty_weights():
    model = nn.Sequential(*[nn.Linear(3072, 3072, bias=False) for _ in range(16)])
x = torch.ones(1, 3072)
nn.Linear(3072, 3072, bias=False)(x)  # what the first product of this process sets up is not a weight
before = process_peak_bytes()
load_checkpoint_and_dispatch(model, sys.argv[1], device_map={"": "disk"}, offload_folder=sys.argv[1] + "/offload")
with torch.no_grad():
    result = model(x)
print(process_peak_bytes() - before, float(result.sum()))
"""


def test_memory_stays_at_a_few_layers(tmp_path: Path) -> None:
    """16 layers of 36 MiB, run from disk in the memory of four. (Smaller ones may fragment the C library's heap.)"""
    layer = torch.eye(3072)
    for index in range(0, 16, 8):
        names = [f"{number}.weight" for number in range(index, index + 8)]
        save_file({name: layer.clone() for name in names}, tmp_path / f"m-{index}.safetensors")
    where = {f"{number}.weight": f"m-{number // 8 * 8}.safetensors" for number in range(16)}
    (tmp_path / "m.safetensors.index.json").write_text(str(where).replace("'", '"'))
    script = tmp_path / "script.py"
    script.write_text(MEMORY)
    grown, total = run_script(script, tmp_path).split()
    assert float(total) == 3072
    imports = 16 << 20  # modules that are imported on the way, of some releases of Python and PyTorch
    assert int(grown) < 4 * layer.nbytes + imports


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_over_an_accelerator_the_host_and_the_disk(tmp_path: Path) -> None:
    expected = _outputs(seeded())
    places = {"": 0, "blocks.1": "cpu", "blocks.2": "disk", "head": 0}
    model = dispatch_model(seeded(), places, offload_dir=tmp_path)
    assert model.embedding.weight is model.head.weight
    assert model.embedding.weight.device.type == torch.accelerator.current_accelerator().type
    assert model.blocks[1].scale.is_meta
    result = _outputs(model)
    assert result.device == IDS.device, "the output comes back where the input was"
    torch.testing.assert_close(result, expected)
    remove_hook_from_submodules(model)
    assert model.blocks[1].scale.device.type == "cpu"
