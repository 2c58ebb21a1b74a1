"""The benchmarks run, time what they say, and rewrite their own section of a page only."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.browser import needs_browser

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))  # as for a script: they share a module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.mark.slow
def test_optimizers_are_measured_and_written_into_their_page(tmp_path: Path) -> None:
    text, page, picture = tmp_path / "text.txt", tmp_path / "page.md", tmp_path / "picture.svg"
    text.write_text("To be, or not to be, that is the question. " * 400)
    page.write_text("above\n<!-- begin: optimizers -->\n<!-- end: optimizers -->\n")
    _run(
        str(FOLDER / "optimizers.py"), "--steps", "3", "--only", "adamw_torch", "adafactor", "schedule_free_sgd",
        "--text", str(text), "--write", str(page), "--plot", str(picture),
    )  # fmt: skip
    written = page.read_text()
    assert "| `adamw_torch` | 8.00 |" in written
    assert "| `schedule_free_sgd` | 4.00 |" in written
    assert picture.read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
@needs_browser
def test_a_page_costs_little(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="windlass ui needs uvicorn")
    found = tmp_path / "figures.json"
    _run(str(FOLDER / "page.py"), "--rounds", "1", "--seconds", "5", "--json", str(found))
    figures = json.loads(found.read_text())
    assert figures["bytes"] < 1e6
    assert figures["following"] < 0.05, "processor time, of which a look may take 1 %"
    assert len(figures["first_paint_ms"]) == 1


def test_percentile() -> None:
    common = _load("common")
    assert common.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert common.percentile([0.0, 10.0], 0.1) == pytest.approx(1.0)
    assert common.percentile([7.0], 0.1) == 7.0


def test_a_table_names_the_command_that_measured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/a/place/feed.py", "--json", "raw.json", "--only", "a b", "--write=page.md", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", words)
    common = _load("common")
    assert common.caption(common.facts(())).startswith(
        "`python benchmarks/feed.py --only 'a b' --rounds 1` on 2"
    )


def test_a_page_keeps_what_is_not_the_section(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "above\n<!-- begin: a -->\nold\n<!-- end: a -->\nbelow\n<!-- begin: b -->\nb\n<!-- end: b -->\n"
    )
    _load("common").rewrite(page, "a", "new")
    assert page.read_text() == (
        "above\n<!-- begin: a -->\nnew\n<!-- end: a -->\nbelow\n<!-- begin: b -->\nb\n<!-- end: b -->\n"
    )
    with pytest.raises(SystemExit, match="no section"):
        _load("common").rewrite(page, "c", "new")


def test_the_page_has_every_section() -> None:
    text = (FOLDER.parent / "docs" / "benchmarks.md").read_text("utf-8")
    sections = (
        "overhead",
        "call-path",
        "startup",
        "feed",
        "distributed",
        "deepspeed",
        "hub",
        "checkpoint",
        "contention",
        "resume",
        "preparation",
        "page",
        "gpu",
        "gpu-axes",
        "axes",
        "sft",
        "sft-images",
        "loss-memory",
    )
    for section in sections:
        assert f"<!-- begin: {section} -->" in text
        assert f"<!-- end: {section} -->" in text


def test_the_clock_has_the_marks_that_overhead_times() -> None:
    assert _load("overhead").clock_cost(updates=3)["marks"] > 5


@pytest.mark.slow
def test_overhead_times_every_step(tmp_path: Path) -> None:
    raw = tmp_path / "figures.json"
    _run(
        str(FOLDER / "overhead.py"),
        "--steps",
        "31",
        "--rounds",
        "2",
        "--only",
        "windlass",
        "--json",
        str(raw),
    )
    figures = json.loads(raw.read_text())
    # 31 calls of the model are 30 distances, of which the first 20 of each round warm up
    assert {name: it["steps"] for name, it in figures["microseconds"].items()} == {"raw": 20, "windlass": 20}
    assert figures["versions"]["torch"]


@pytest.mark.slow
def test_the_path_of_an_update_is_counted(tmp_path: Path) -> None:
    raw = tmp_path / "figures.json"
    _run(str(FOLDER / "call_path.py"), "--json", str(raw))
    path = json.loads(raw.read_text())["path"]
    listed = _run(str(FOLDER / "call_path.py"), "--list").stdout
    update, save = listed.split("One update\n", 1)[1].split("One save\n")
    for part, text in (("update", update), ("save", save)):
        assert sum(".py: " in line for line in text.splitlines()) == path[f"{part}_files"]
    assert "engine/native.py" in update
    assert "    NativeExecutor.run_step\n" in update
    assert "checkpoint/store.py" in save


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_are_timed_by_every_loop(tmp_path: Path) -> None:
    raw = tmp_path / "figures.json"
    sizes = ("--steps", "8", "--rounds", "1", "--only", "accelerator,trainer")
    _run(str(FOLDER / "distributed.py"), *sizes, "--strategies", "fsdp", "--json", str(raw))
    found = json.loads(raw.read_text())["milliseconds"]["fsdp"]
    # 8 calls of the model are 7 distances, of which the first 5 warm up.
    assert {name: it["steps"] for name, it in found.items()} == {"raw": 2, "accelerator": 2, "trainer": 2}


@pytest.mark.slow
def test_saves_are_timed_by_every_contender(tmp_path: Path) -> None:
    raw = tmp_path / "figures.json"
    sizes = ("--saves", "2", "--rounds", "1", "--every", "4", "--width", "32", "--layers", "2", "--disk", "1")
    _run(str(FOLDER / "checkpoint.py"), *sizes, "--folder", str(tmp_path), "--json", str(raw))
    figures = json.loads(raw.read_text())
    assert set(figures["seconds"]) == {
        "windlass", "windlass, slow disk", "windlass, slow disk, one core free",
        "transformers", "transformers, fsynced",
    }  # fmt: skip
    for it in figures["seconds"].values():
        assert it["blocked"] > 0
        assert it["committed"] > 0
    assert figures["seconds"]["windlass, slow disk"]["steps_during"] > 0
    assert figures["hashing"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "it leaves nothing behind"


@pytest.mark.slow
def test_resuming_is_timed_early_and_late(tmp_path: Path) -> None:
    raw = tmp_path / "figures.json"
    sizes = ("--samples", "50000", "--rounds", "1", "--kind", "stateful", "--json", str(raw))
    _run(str(FOLDER / "checkpoint_resume.py"), *sizes)
    ((kind, found),) = json.loads(raw.read_text())["fastest"].items()
    assert kind == "stateful"
    assert list(found) == ["1 %", "99 %"]
    assert all(whole > inside > 0 for whole, inside in found.values())


@pytest.mark.slow
def test_contention_times_every_policy(tmp_path: Path) -> None:
    raw = tmp_path / "figures.json"
    loads = ("--loads", "0,1", "--seconds", "0.1", "--rounds", "1", "--starts", "1")
    done = _run(str(FOLDER / "contention.py"), *loads, "--json", str(raw))
    measured = json.loads(raw.read_text())["policies"]
    assert set(measured) == {"default", "passive", "windlass"}
    assert all(cell["ms"] > 0 for cells in measured.values() for cell in cells.values())
    assert "| 1 | " in done.stdout


@pytest.mark.slow
def test_gpu_divides_rows_and_layers_of_a_toy_model(tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    _run(str(FOLDER / "gpu.py"), "--tiny", "--axes", "2", "--json", str(raw))
    runs = json.loads(raw.read_text())["runs"]
    assert [(it["label"], it["length"]) for it in runs] == [
        ("layers", 64),
        ("rows, ring", 64),
        ("rows, heads", 64),
    ]
    first = runs[0]["first_loss"]
    assert all(it["first_loss"] == pytest.approx(first, rel=1e-2) for it in runs)


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_divides_a_long_row(tmp_path: Path) -> None:
    gpu, raw = _load("gpu"), tmp_path / "raw.json"
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two accelerators")
    _run(str(FOLDER / "gpu.py"), "--axes", "2", "--steps", "4", "--warmup", "1", "--json", str(raw))
    runs = json.loads(raw.read_text())["runs"]
    assert len(runs) == len(gpu.AXES) * len(gpu.LENGTHS)
    assert not any("error" in it for it in runs)


@pytest.mark.slow
def test_gpu_runs_on_a_toy_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    raw = tmp_path / "figures.json"
    _run(str(FOLDER / "gpu.py"), "--tiny", "--no-compile", "--only", "raw,windlass", "--json", str(raw))
    by_loop = {it["loop"]: it for it in json.loads(raw.read_text())["runs"]}
    # The same weights: the first loss differs by the order of the samples alone.
    assert by_loop["windlass"]["first_loss"] == pytest.approx(by_loop["raw"]["first_loss"], rel=0.1)
    assert by_loop["windlass"]["parameters"] == by_loop["raw"]["parameters"]


def test_mfu_of_a_known_case() -> None:
    gpu = _load("gpu")
    it = {
        "parameters": 1_000_000_000,
        "layers": 10,
        "width": 1000,
        "length": 1000,
        "tokens_per_second": 10_000.0,
    }
    assert gpu.mfu(it, 100.0) == "60.6 %"
    assert gpu.mfu(it, None) == ""
    assert gpu.peak_tflops("NVIDIA H100 80GB HBM3") == 989.0
    assert gpu.peak_tflops("something else") is None


@pytest.mark.slow
def test_preferences_are_measured_beside_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    raw = tmp_path / "figures.json"
    small = ("--vocabulary", "2000", "--hidden", "32", "--prompt", "8", "--answer", "8", "--rounds", "1")
    _run(str(FOLDER / "preferences.py"), *small, "--json", str(raw))
    figures = json.loads(raw.read_text())["contenders"]
    assert all(it["speed"] > 0 for it in figures.values())


@pytest.mark.slow
def test_the_memory_of_a_loss_is_measured(tmp_path: Path) -> None:
    raw = tmp_path / "figures.json"
    small = ("--vocabulary", "16000", "--tokens", "512", "--hidden", "64", "--rounds", "1")
    _run(str(FOLDER / "loss_memory.py"), *small, "--json", str(raw))
    figures = json.loads(raw.read_text())["contenders"]
    # logits of 512 x 16000 floats, kept twice at least by a plain loss
    assert figures["transformers"]["bytes"] > 2 * 512 * 16000 * 4
    assert figures["windlass"]["bytes"] < figures["transformers"]["bytes"] / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["hand", "windlass_packed", "windlass_budget", "transformers_default", "trl_packed"]
)
def test_a_contender_of_fine_tuning_counts_its_updates(name: str) -> None:
    done = _run(str(FOLDER / "sft_contenders.py"), name, "long tail", "0")
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["updates"] == 4, "one after the three that are skipped"
    assert figures["tokens_per_second"] > 0


@pytest.mark.slow
def test_fine_tuning_on_images_is_measured_beside_trl(tmp_path: Path) -> None:
    raw = tmp_path / "figures.json"
    _run(str(FOLDER / "sft_images.py"), "--updates", "2", "--rounds", "1", "--json", str(raw))
    figures = json.loads(raw.read_text())["contenders"]
    assert set(figures) == {"windlass", "windlass_grouped", "trl"}
    assert all(it["samples_per_second"] > 0 and it["memory"] > 0 for it in figures.values())


def test_a_contender_of_fine_tuning_that_fails_is_a_row() -> None:
    done = _run(str(FOLDER / "sft.py"), "--contenders", "hand", "--data", "nothing", "--rounds", "2")
    assert "each document alone | failed: unknown data 'nothing'" in done.stdout
    assert done.stderr.count("unknown data 'nothing'") == 1, "it is not started again"
