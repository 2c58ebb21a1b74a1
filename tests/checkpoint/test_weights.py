from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.checkpoint.faults import CountingFiles, failing, write_parts
from torch import Tensor, nn

from windlass.checkpoint import weights
from windlass.checkpoint.sharded import load_parts
from windlass.checkpoint.weights import ALIASES_KEY, load_weights, save_weights, weights_bytes
from windlass.core.errors import CheckpointError
from windlass.core.world import World


class Tied(nn.Module):
    """Embedding and head tied, a buffer that aliases the head, a frozen layer, a buffer that is not to be saved."""

    def __init__(self, width: int = 4, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 6, bias=False)
        if tie:
            self.head.weight = self.embed.weight
            self.register_buffer("mirror", self.head.weight.detach())
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.rand(2), persistent=False)


class Overlapping(nn.Module):
    """Three parameters in one memory: the whole, a part that begins in it, and the whole transposed."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.rand(4, 4)
        self.whole, self.part, self.turned = nn.Parameter(base), nn.Parameter(base[1:3]), nn.Parameter(base.T)
        self.apart = nn.Parameter(torch.rand(8)[::2])


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "build", [Tied, lambda: Tied(tie=False), Overlapping, lambda: nn.Linear(2, 2).to(torch.bfloat16)]
)
def test_round_trip(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, other = build(), build()
    pointers = {name: value.data_ptr() for name, value in other.state_dict().items()}
    entry = save_weights(tmp_path, model.state_dict())
    load_weights(tmp_path, other)
    assert_equal(model, other)
    assert {name: value.data_ptr() for name, value in other.state_dict().items()} == pointers  # ties stand
    assert entry.size == (tmp_path / "model.safetensors").stat().st_size
    assert 0 <= entry.size - weights_bytes(model.state_dict()) < 4096


def test_views_of_one_memory_are_given_one_value(tmp_path: Path) -> None:
    model = Overlapping()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_weights(tmp_path, state)
    load_weights(tmp_path, model)
    model.whole.data[1, 0] = torch.nan
    save_weights(tmp_path, model.state_dict())
    load_weights(tmp_path, model)  # NaN equals itself
    before = model.whole.detach().clone()
    for name in ("part", "turned"):
        save_weights(tmp_path, {**state, name: state[name] + 1})
        with pytest.raises(CheckpointError, match=r"different values for .*, which share memory"):
            load_weights(tmp_path, model)
        assert torch.equal(model.whole.nan_to_num(), before.nan_to_num()), "nothing was written"


def test_parts_of_ranks_keep_ties_and_views(tmp_path: Path) -> None:
    for build in (Tied, Overlapping):
        folder = tmp_path / build.__name__
        folder.mkdir()
        model, other = build(), build()
        pointers = {name: value.data_ptr() for name, value in other.state_dict().items()}
        write_parts(folder, "model", model.state_dict(keep_vars=True), World())
        assert '"version": 1' in (folder / "model.parts.json").read_text(), "earlier releases read it"
        load_parts(folder, other)
        assert_equal(model, other)
        assert {name: value.data_ptr() for name, value in other.state_dict().items()} == pointers


def test_tied_weights_are_stored_once_and_the_map_says_so(tmp_path: Path) -> None:
    save_weights(tmp_path, Tied().state_dict())
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"mirror", "frozen.weight", "frozen.bias", "count"}
        assert file.metadata()["format"] == "pt"
        assert file.metadata()[ALIASES_KEY] == '{"embed.weight": "mirror", "head.weight": "mirror"}'


def test_lazy_views_of_one_memory_are_no_ties(tmp_path: Path) -> None:
    base = torch.tensor([1 + 2j])
    views = {"a": base, "conj": base.conj(), "real": base.imag, "neg": base.conj().imag}
    save_weights(tmp_path, views)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {name: value.item() for name, value in stored.items()} == {
        "a": 1 + 2j, "conj": 1 - 2j, "real": 2.0, "neg": -2.0,
    }  # fmt: skip


def test_tied_file_into_an_untied_model_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied = Tied()
    save_weights(tmp_path, tied.state_dict())
    untied = Tied(tie=False)
    untied.register_buffer("mirror", torch.zeros(6, 4))
    load_weights(tmp_path, untied)
    assert torch.equal(untied.head.weight, tied.embed.weight)
    untied.head.weight.data[-1] += 1
    monkeypatch.setattr(weights, "_COMPARED", 16)  # two times before the last
    save_weights(tmp_path, untied.state_dict())
    before = tied.embed.weight.clone()
    with pytest.raises(CheckpointError, match=r"different values for '(embed|head)\.weight' and 'mirror'"):
        load_weights(tmp_path, tied)
    assert torch.equal(tied.embed.weight, before)  # nothing was written


def test_saving_again_replaces_the_file_and_a_failure_leaves_it(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    save_weights(tmp_path, one.state_dict())
    count = CountingFiles()
    save_weights(tmp_path, one.state_dict(), files=count)
    for at in range(1, count.count + 1):
        with pytest.raises(OSError, match="No space"):
            save_weights(tmp_path, two.state_dict(), files=CountingFiles(at, failing()))
        two.reset_parameters()
        load_weights(tmp_path, two)
        assert_equal(one, two)
    save_weights(tmp_path, nn.Linear(2, 2).state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_first_save_that_fails_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    model, count = nn.Linear(2, 2), CountingFiles()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    save_weights(whole, model.state_dict(), files=count)
    for at in range(
        1, count.count
    ):  # the last one is the rename: its file is whole, and the next save replaces it
        with pytest.raises(OSError, match="No space"):
            save_weights(broken, model.state_dict(), files=CountingFiles(at, failing()))
        assert list(broken.iterdir()) == []


def test_a_file_of_another_program_may_leave_tied_names_out(tmp_path: Path) -> None:
    tied, other = Tied(), Tied()
    state = {
        name: value for name, value in tied.state_dict().items() if name not in ("embed.weight", "mirror")
    }
    safetensors.torch.save_file(
        {name: value.clone() for name, value in state.items()}, tmp_path / "model.safetensors"
    )
    load_weights(tmp_path, other)
    assert_equal(tied, other)


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_wrappers_leave_no_trace(prefix: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    save_weights(tmp_path, {prefix + name: value for name, value in model.state_dict().items()})
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    load_weights(tmp_path, other)
    assert_equal(model, other)


def test_a_compiled_part_and_a_child_named_module_keep_their_places(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    state = {name.replace("head.", "head._orig_mod."): value for name, value in model.state_dict().items()}
    save_weights(tmp_path, state)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"module.weight", "module.bias", "head.weight", "head.bias"}


def test_a_wrapped_model_loads_what_a_bare_one_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_weights(tmp_path, model.state_dict())
    wrapped = nn.ModuleDict({"module": nn.Linear(2, 2)})  # names as DistributedDataParallel gives them
    load_weights(tmp_path, wrapped)
    assert torch.equal(wrapped["module"].weight, model.weight)


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="canonical name 'a'"):
        save_weights(tmp_path, {"a": torch.ones(1), "_orig_mod.a": torch.ones(1)})


def test_another_model_is_refused_with_names_and_shapes_and_untouched(tmp_path: Path) -> None:
    save_weights(tmp_path, {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3), "gone": torch.ones(1)})
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, model)
    message = str(caught.value)
    assert "2 missing in the file: 1.weight, 1.bias" in message
    assert "1 that the model does not have: gone" in message
    assert "0.weight is [3, 2] in the file and [4, 2] in the model" in message
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_long_lists_are_cut(tmp_path: Path) -> None:
    save_weights(tmp_path, {"x": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"40 missing in the file: .* and 35 more"):
        load_weights(tmp_path, nn.Sequential(*(nn.Linear(1, 1) for _ in range(20))))


def test_meta_parameters_are_refused(tmp_path: Path) -> None:
    save_weights(tmp_path, nn.Linear(2, 2).state_dict())
    with pytest.raises(CheckpointError, match="meta device"):
        load_weights(tmp_path, nn.Linear(2, 2, device="meta"))
    with pytest.raises(CheckpointError, match="weight is on the meta device"):
        save_weights(tmp_path / "other", nn.Linear(2, 2, device="meta").state_dict())


def test_a_dtype_that_changes_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("windlass.checkpoint.weights"), "warning", lambda *a: said.append(a[0] % a[1:])
    )
    save_weights(tmp_path, nn.Linear(2, 2).state_dict())
    load_weights(tmp_path, nn.Linear(2, 2).to(torch.float64))
    assert said == ["2 weights change dtype as they are loaded: weight, bias"]


def test_memory_format_stays(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    other = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    save_weights(tmp_path, model.state_dict())
    load_weights(tmp_path, other)
    assert_equal(model, other)
    assert other.weight.is_contiguous(memory_format=torch.channels_last)


def _llama(tie: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tie,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 31, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    return transformers.BertForSequenceClassification(transformers.BertConfig(num_attention_heads=2, **sizes))


def _masked_bert() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BertForMaskedLM(_bert().config)


def _t5() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 31, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


@pytest.mark.parametrize(
    "build",
    [lambda: _llama(True), lambda: _llama(False), _bert, _masked_bert, _t5],
    ids=["tied", "untied", "bert", "mlm", "t5"],
)
def test_from_pretrained_reads_what_we_write(build: Callable[[], Any], tmp_path: Path) -> None:
    model = build()
    save_weights(tmp_path, model.state_dict())
    model.config.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert_equal(model, loaded)
    assert _ties(model) == _ties(loaded)
    ours = build()
    load_weights(tmp_path, ours)
    assert_equal(model, ours)
    assert _ties(model) == _ties(ours)


def test_we_read_what_save_pretrained_writes(tmp_path: Path) -> None:
    for tie in (True, False):
        model, ours = _llama(tie), _llama(tie)
        model.save_pretrained(tmp_path / str(tie))
        load_weights(tmp_path / str(tie), ours)
        assert_equal(model, ours)


def _ties(model: nn.Module) -> set[frozenset[str]]:
    places: dict[int, set[str]] = {}
    state: dict[str, Tensor] = model.state_dict()
    for name, value in state.items():
        places.setdefault(value.data_ptr(), set()).add(name)
    return {frozenset(names) for names in places.values() if len(names) > 1}
