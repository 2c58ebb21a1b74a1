"""`windlass checkpoint`, on real checkpoints of a small model with tied weights and its optimizer."""

from __future__ import annotations

import copy
import errno
import json
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from windlass.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_adapter
from windlass.checkpoint.content import Content
from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.optimizer_state import save_optimizer_state
from windlass.checkpoint.sharded import rank_file
from windlass.checkpoint.store import Store
from windlass.checkpoint.tensor_file import CODES, TensorFile, write_tensors
from windlass.checkpoint.weights import WEIGHTS_NAME
from windlass.cli.main import main
from windlass.dist.sharded import Part

METRICS = {1: 0.5, 2: 0.2, 3: 0.9, 4: None}


class Run:
    """A run that saves checkpoints as training does."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(
            LlamaConfig(vocab_size=11, tie_word_embeddings=True, dtype="float32", **sizes)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.root = root
        self.manager = CheckpointManager(Store(root))
        self.files = self._companions(root.with_name("companions"))

    def _companions(self, folder: Path) -> dict[str, bytes]:
        self.model.config.save_pretrained(folder)
        arguments = {"metric_for_best_model": "loss", "greater_is_better": False}
        (folder / "training_args.json").write_text(json.dumps(arguments))
        (folder / "tokenizer_config.json").write_text("{}")
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def update(self) -> None:
        tokens = torch.arange(10).reshape(2, 5)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()

    def save(self, step: int, **meta: Any) -> Path:
        shared = {
            "optimizer": save_optimizer_state(self.optimizer, self.model),
            "trainer_state": {"global_step": step, "best_model_checkpoint": None},
        }
        content = Content(
            shared=shared,
            per_rank={"rng": torch.ones(3)},
            weights={WEIGHTS_NAME: self.model.state_dict()},
            files=self.files,
        )
        path = self.manager.save(step, content, meta=meta)
        assert path is not None
        return path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    for step, metric in METRICS.items():
        made.update()
        made.save(step, metric=metric)
    return made


Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command and return its exit code and what it wrote to both streams."""

    def command(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["checkpoint", *map(str, words)])
        return code, *capsys.readouterr()

    return command


def in_parts(folder: Path, stem: str, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Write tensors as two ranks do that hold the rows of each between them."""
    folder.mkdir(exist_ok=True)
    halves: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    entries = {}
    for name, tensor in tensors.items():
        rows = tensor.shape[0]
        cut = (rows + 1) // 2
        halves[0][name], halves[1][name] = tensor[:cut], tensor[cut:]
        parts = [[0, 0, cut], [1, cut, rows - cut]]
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "dim": 0, "parts": parts}
    for rank, half in enumerate(halves):
        write_tensors(folder / rank_file(stem, rank), half, files=Files())
    index = {"version": 1, "ranks": 2, "aliases": dict(aliases), "tensors": entries}
    (folder / f"{stem}.parts.json").write_text(json.dumps(index))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# --- ls and verify


def test_what_lies_there_is_listed(run: Run, say: Say) -> None:
    run.save(5, metric=None, ephemeral=True)
    (run.root / "checkpoint-3" / "model.safetensors").unlink()
    (run.root / "checkpoint-9").mkdir()
    code, out, _ = say("ls", run.root, "--json")
    rows = {row["step"]: row for row in json.loads(out)}
    assert code == 0
    assert {step: row["marks"] for step, row in rows.items()} == {
        None: [], 1: [], 2: ["best"], 3: [], 4: [], 5: ["last", "ephemeral"],
    }  # fmt: skip
    assert "model.safetensors is missing" in rows[3]["problem"]
    assert "manifest.json" in rows[None]["problem"]
    assert (rows[1]["metric"], rows[1]["world_size"], rows[1]["metric_name"]) == (0.5, 1, "loss")
    assert rows[1]["bytes"] > 10_000
    code, out, _ = say("ls", run.root)
    assert code == 0
    assert len(out.splitlines()) == 7
    assert "checkpoint-9" in out


def test_one_can_be_listed_alone(run: Run, say: Say) -> None:
    assert len(json.loads(say("ls", run.root / "checkpoint-2", "--json")[1])) == 1


def test_every_byte_is_verified(run: Run, say: Say) -> None:
    assert say("verify", run.root)[0] == 0
    damaged = run.root / "checkpoint-2" / "optimizer.safetensors"
    flip(damaged)
    code, out, _ = say("verify", run.root)
    assert code == 1
    assert [line for line in out.splitlines() if "whole" not in line] == [
        f"{damaged.parent}: {damaged} is damaged: its content does not match the manifest's hash"
    ]
    assert say("verify", run.root / "checkpoint-1")[0] == 0
    assert say("verify", damaged.parent)[0] == 1
    (damaged.parent / "manifest.json").unlink()
    assert say("verify", damaged.parent)[0] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ls", "empty"), "has no checkpoints"),
        (("verify", "nowhere"), "is not a folder"),
        (("ls", "s3://bucket/run"), "is not a folder of this machine"),
        (("diff", "empty", "nowhere"), "is not a folder"),
        (("diff", "empty", "empty"), "holds no weights"),
        (("export", "empty", "out.safetensors"), "holds no weights"),
        (("export", "empty", "out"), "holds no weights"),
        (("prune", "empty", "--keep-last", "1"), "has no complete checkpoints"),
        (("prune", "empty"), "set what to keep"),
    ],
)
def test_errors_are_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    code, out, err = say(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_one_checkpoint_is_not_pruned(run: Run, say: Say) -> None:
    code, out, err = say("prune", run.root / "checkpoint-1", "--keep-last", "1")
    assert (code, out) == (2, "")
    assert f"checkpoint-1 is one checkpoint: name its folder, {run.root}" in err


def test_the_last_is_that_of_the_run_also_where_one_is_named(run: Run, say: Say) -> None:
    _, out, _ = say("ls", "--json", run.root / "checkpoint-1")
    assert [row["marks"] for row in json.loads(out)] == [[]]
    _, out, _ = say("ls", "--json", run.root / "checkpoint-4")
    assert [row["marks"] for row in json.loads(out)] == [["last"]]


@pytest.mark.parametrize("number", ["0", "-1", "few"])
def test_a_number_to_keep_says_what_it_may_be(
    number: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", "prune", str(run.root), f"--keep-last={number}"])
    assert left.value.code == 2
    assert (
        f"argument --keep-last: must be a whole number, 1 or more, and is {number}" in capsys.readouterr().err
    )


@pytest.mark.parametrize("words", [("export", "RUN", "out"), ("diff", "RUN", "RUN")])
def test_a_runs_folder_in_the_place_of_a_checkpoint_is_told_of_those_in_it(
    words: tuple[str, ...], run: Run, say: Say
) -> None:
    code, out, err = say(*(str(run.root) if word == "RUN" else word for word in words))
    assert (code, out) == (2, "")
    assert f"holds no weights, but checkpoints do: name one, such as {run.root / 'checkpoint-4'}" in err


# --- diff


def test_equal_ones_do_not_differ(run: Run, tmp_path: Path, say: Say) -> None:
    shutil.copytree(run.root / "checkpoint-1", tmp_path / "copy")
    code, out, _ = say("diff", run.root / "checkpoint-1", tmp_path / "copy")
    assert (code, out.splitlines()[-1].split(";")[0]) == (0, "nothing differs")


def test_what_differs_is_said(run: Run, tmp_path: Path, say: Say) -> None:
    with torch.no_grad():
        run.model.model.norm.weight[3] += 0.25
    run.optimizer.state[run.model.model.norm.weight]["exp_avg"][0] = float("nan")
    changed = run.save(5, metric=None)
    code, out, _ = say("diff", run.root / "checkpoint-4", changed, "--json")
    found = {(one["where"], one["name"]): one["what"] for one in json.loads(out)["differences"]}
    assert code == 1
    assert found == {
        ("model", "model.norm.weight"): "max abs difference 0.25",
        ("optimizer", "model.norm.weight/exp_avg"): "max abs difference nan",
        ("trainer_state.json", "global_step"): "4 became 5",
    }


def test_layouts_compare_by_their_tensors(run: Run, tmp_path: Path, say: Say) -> None:
    source = run.root / "checkpoint-4"
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()
    weights["extra"] = torch.zeros(2)
    parts = tmp_path / "parts"
    in_parts(parts, "model", weights, {"lm_head.weight": "model.embed_tokens.weight"})
    moments = {
        name.removeprefix("state/"): tensor
        for name, tensor in load_file(source / "optimizer.safetensors").items()
    }
    in_parts(parts, "optimizer", {name: tensor for name, tensor in moments.items() if tensor.ndim}, {})
    counters = {f"state/{name}": tensor for name, tensor in moments.items() if not tensor.ndim}
    write_tensors(parts / "optimizer.safetensors", counters, files=Files())
    _, out, _ = say("diff", source, parts, "--json")
    found = {
        one["name"]: one["what"]
        for one in json.loads(out)["differences"]
        if one["where"] in ("model", "optimizer")
    }
    assert found == {
        "model.norm.weight": f"dtype float32 became bfloat16, max abs difference {rounding(source):.6g}",
        "extra": "added",
    }
    assert json.loads(out)["equal_tensors"] == len(weights) + 1 - 2 + len(moments)


def rounding(source: Path) -> float:
    weight = load_file(source / "model.safetensors")["model.norm.weight"]
    return float((weight.double() - weight.bfloat16().double()).abs().max())


# --- export


def test_one_file_holds_the_weights_and_says_what_is_tied(run: Run, tmp_path: Path, say: Say) -> None:
    target = tmp_path / "out" / "weights.safetensors"
    _, told, _ = say("export", run.root / "checkpoint-4", target, "--json")
    assert json.loads(told) == {"written": [{"path": str(target), "bytes": target.stat().st_size}]}
    found, expected = load_file(target), run.model.state_dict()
    with safe_open(target, "pt") as file:
        aliases = json.loads(file.metadata()["windlass.aliases"])
    assert found.keys() | aliases.keys() == expected.keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
    assert all(torch.equal(expected[name], found[kept]) for name, kept in aliases.items())
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("layout", ["whole", "parts", "split"])
@pytest.mark.parametrize("size", ["2KB", "5GB"])
def test_from_pretrained_reads_the_folder(layout: str, size: str, run: Run, tmp_path: Path, say: Say) -> None:
    source, target = run.root / "checkpoint-4", tmp_path / "hf"
    if layout == "parts":
        in_parts(tmp_path / "parts", "model", load_file(source / "model.safetensors"), {})
        shutil.copy(source / "config.json", tmp_path / "parts")
        source = tmp_path / "parts"
    elif layout == "split":
        run.model.save_pretrained(tmp_path / "split", max_shard_size="1KB")
        assert (tmp_path / "split" / "model.safetensors.index.json").exists()
        source = tmp_path / "split"
    assert say("export", source, target, "--max-shard-size", size)[0] == 0
    assert (target / "model.safetensors.index.json").exists() == (size == "2KB")
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    expected = run.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert not {"optimizer.safetensors", "trainer_state.json", "manifest.json"} & {
        path.name for path in target.iterdir()
    }
    if layout == "whole":
        assert (target / "tokenizer_config.json").exists()


def test_another_dtype_is_the_configurations_too(run: Run, tmp_path: Path, say: Say) -> None:
    assert say("export", run.root / "checkpoint-4", tmp_path / "hf", "--dtype", "bf16")[0] == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    expected = run.model.state_dict()["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, expected.bfloat16())


def test_the_optimizers_state_alone(run: Run, tmp_path: Path, say: Say) -> None:
    target = tmp_path / "moments.safetensors"
    words = ("export", run.root / "checkpoint-4", target, "--tensors", "optimizer", "--dtype", "bf16")
    assert say(*words)[0] == 0
    found = load_file(target)
    entry = run.optimizer.state[run.model.model.norm.weight]
    assert torch.equal(found["model.norm.weight/exp_avg"], entry["exp_avg"].bfloat16())
    assert torch.equal(found["model.norm.weight/step"], entry["step"])
    code, _, err = say("export", run.root / "checkpoint-4", tmp_path / "hf", "--tensors", "optimizer")
    assert code == 2
    assert "from_pretrained reads no optimizer state" in err


def test_adapters_go_with_their_configuration(run: Run, tmp_path: Path, say: Say) -> None:
    peft = pytest.importorskip("peft")
    base = copy.deepcopy(run.model)
    model = peft.get_peft_model(
        run.model, peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    )
    adapter = find_adapter(model)
    assert adapter is not None
    source, target = tmp_path / "adapters", tmp_path / "out"
    adapter.save_config(source)
    write_tensors(source / ADAPTER_WEIGHTS, adapter.weights(model.state_dict()), files=Files())
    assert say("export", source, target, "--dtype", "fp64")[0] == 0
    assert {path.name for path in target.iterdir()} == {ADAPTER_WEIGHTS, ADAPTER_CONFIG}
    found = peft.PeftModel.from_pretrained(
        base.double(), str(target), autocast_adapter_dtype=False
    ).state_dict()
    expected = model.double().state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_only_an_earlier_result_is_replaced(run: Run, tmp_path: Path, say: Say) -> None:
    source = run.root / "checkpoint-4"
    for target in (tmp_path / "hf", tmp_path / "one.safetensors"):
        assert say("export", source, target)[0] == 0
        code, _, err = say("export", source, target, "--dtype", "bf16")
        assert code == 2
        assert "is there already" in err
        assert say("export", source, target, "--dtype", "bf16", "--force")[0] == 0
    weights = [tmp_path / "hf" / "model.safetensors", tmp_path / "one.safetensors"]
    assert {load_file(path)["model.norm.weight"].dtype for path in weights} == {torch.bfloat16}
    (tmp_path / "hf" / "thesis.txt").write_text("mine")
    for target in (tmp_path / "hf", run.root, source, source / "model.safetensors"):
        code, _, err = say("export", source, target, "--force")
        assert code == 2
        assert "is not replaced" in err
    assert (tmp_path / "hf" / "thesis.txt").exists()
    assert not list(tmp_path.glob("tmp-*"))


@pytest.mark.parametrize("target", ["hf", "one.safetensors"])
def test_a_damaged_source_leaves_no_result(target: str, run: Run, tmp_path: Path, say: Say) -> None:
    flip(run.root / "checkpoint-4" / "model.safetensors")
    code, _, err = say("export", run.root / "checkpoint-4", tmp_path / target)
    assert code == 2
    assert "model.safetensors is damaged" in err
    assert not list(tmp_path.glob(f"*{target}"))


def test_memory_holds_one_tensor_at_a_time(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    live, peak = [0], [0]
    layers = nn.ModuleList(nn.Linear(1000, 250, bias=False) for _ in range(12))
    source = tmp_path / "model"
    source.mkdir()
    write_tensors(source / "model.safetensors", layers.state_dict(), files=Files())
    del layers
    read = TensorFile.read

    def counted(self: TensorFile, name: str, wanted: Part | None = None) -> Tensor:
        tensor = read(self, name, wanted)
        live[0] += 1
        peak[0] = max(peak[0], live[0])
        weakref.finalize(tensor, lambda: live.__setitem__(0, live[0] - 1))
        return tensor

    monkeypatch.setattr(TensorFile, "read", counted)
    assert say("export", source, tmp_path / "out.safetensors")[0] == 0
    assert 1 <= peak[0] <= 2
    peak[0] = 0
    assert say("diff", source, source)[0] == 0
    assert 2 <= peak[0] <= 4


def test_a_split_index_cannot_lead_out_of_its_folder(run: Run, tmp_path: Path, say: Say) -> None:
    split = tmp_path / "split"
    run.model.save_pretrained(split, max_shard_size="1KB")
    index = json.loads((split / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../run/checkpoint-4/model.safetensors")
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    code, _, err = say("export", split, tmp_path / "out.safetensors")
    assert code == 2
    assert "does not lie in its folder" in err


# --- prune


def steps_in(root: Path) -> set[int]:
    return {info.step for info in Store(root).list()}


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("--keep-last", 1), {4}),
        (("--keep-last", 2), {3, 4}),
        (("--keep-best", 1), {2, 4}),
        (("--keep-best", 2, "--keep-last", 1), {1, 2, 4}),
        (("--keep-last", 9), {1, 2, 3, 4}),
    ],
)
def test_the_best_and_the_newest_stay(words: tuple[Any, ...], left: set[int], run: Run, say: Say) -> None:
    code, told, _ = say("prune", run.root, *words, "--dry-run")
    assert code == 0
    assert steps_in(run.root) == set(METRICS)
    going = sorted(set(METRICS) - left)
    assert [line.split(":")[0] for line in told.splitlines()[:-1]] == [
        str(run.root / f"checkpoint-{step}") for step in going
    ]
    code, done, _ = say("prune", run.root, *words)
    assert code == 0
    assert done == told.replace("would be removed", "removed")
    assert steps_in(run.root) == left


def test_damaged_ones_neither_count_nor_go(run: Run, say: Say) -> None:
    (run.root / "checkpoint-4" / "model.safetensors").unlink()
    assert say("prune", run.root, "--keep-last", 1)[0] == 0
    assert steps_in(run.root) == {3, 4}


def test_the_model_that_a_resumed_run_looks_for_stays(run: Run, say: Say) -> None:
    trainer_state = {"global_step": 5, "best_model_checkpoint": "/elsewhere/run/checkpoint-1"}
    weights = {WEIGHTS_NAME: run.model.state_dict()}
    content = Content(shared={"trainer_state": trainer_state}, weights=weights, files=run.files)
    run.manager.save(5, content, meta={})
    assert say("prune", run.root, "--keep-last", 1)[0] == 0
    assert steps_in(run.root) == {1, 5}


def test_the_best_are_known_by_their_metric_only(tmp_path: Path, say: Say) -> None:
    run = Run(tmp_path / "run")
    run.save(1)
    code, _, err = say("prune", run.root, "--keep-best", 1)
    assert code == 2
    assert "has a metric" in err


def test_what_the_disk_refuses_is_said_in_one_line(
    run: Run, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Files, descriptor: int, piece: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Files, "write_some", full)
    code, _, err = say("export", run.root / "checkpoint-4", tmp_path / "hf")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "No space left on device" in err
    assert not list(tmp_path.glob("*hf"))


def test_as_many_are_marked_as_the_run_keeps(run: Run, say: Say) -> None:
    run.files["training_args.json"] = b'{"keep_best": 2, "greater_is_better": true}'
    run.save(5, metric=None)
    rows = json.loads(say("ls", run.root, "--json")[1])
    assert {row["step"] for row in rows if "best" in row["marks"]} == {1, 3}
