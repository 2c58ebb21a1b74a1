"""The benchmark of the preparation measures two contenders that make the same rows."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}."} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("text_preparation", FOLDER / "text_preparation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", ["text", "chat"])
def test_both_make_the_same_rows(benchmark: ModuleType, data: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("trl")
    tokenizer = benchmark.tokenizer_of(data)
    dataset = datasets.Dataset.from_list(benchmark.rows_of(data, form, 50))
    datasets.disable_progress_bars()
    try:
        (ours, packed), (theirs, theirs_packed) = (
            prepare(dataset, tokenizer, form, 1) for prepare in (benchmark.with_windlass, benchmark.with_trl)
        )
    finally:
        datasets.enable_progress_bars()
    assert list(ours) == list(theirs)
    assert list(packed) == list(theirs_packed)
    assert len(packed) < len(ours) == 50


@pytest.mark.slow
def test_the_benchmark_runs(data: Path, tmp_path: Path) -> None:
    raw = tmp_path / "figures.json"
    words = ["--rows", "300", "--rounds", "1", "--cores", "1", "--data", str(data), "--json", str(raw)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "text_preparation.py"), *words],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(raw.read_text())["rows_per_second"]
    assert figures.keys() == {"text, 1", "chat, 1"}
    assert all(speed > 0 for case in figures.values() for speed in case.values())
