"""Every reader of bytes that others may have written refuses mutated ones in bounded memory and time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests import fuzz
from tests.fuzz import INPUTS, TARGETS, Target, findings, of_bytes

from windlass.core.errors import CheckpointError


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_mutated_inputs_are_read_or_refused(target: Target, tmp_path: Path) -> None:
    if "parquet" in target.name:
        pytest.importorskip("pyarrow", reason="writes the seed")
    target.prepare(tmp_path)
    target.read(
        tmp_path
    )  # the seed is valid; of files of torch.save, the process that reads them runs already
    found = [str(finding) for finding in findings(target, 0, 0, INPUTS)]
    assert not found, "\n".join(found)


def _raises(error: Exception) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        raise error

    return read


def _spins(folder: Path) -> None:
    while True:
        pass


def _hoards(folder: Path) -> None:
    bytes(fuzz.MEMORY + (1 << 28))


@pytest.mark.parametrize(
    ("read", "what"),
    [(_raises(KeyError("a")), "KeyError"), (_hoards, "MemoryError"), (_spins, "the process ended with -27")],
    ids=["error", "memory", "time"],
)
def test_a_reader_that_does_not_is_found(
    read: Callable[[Path], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    bad = Target("bad", lambda folder: (folder / "a").write_text("a"), "a", of_bytes, read)
    (found,) = findings(bad, 0, 7, 8)
    assert what in found.what
    assert "python -m tests.fuzz --target 'bad' --seed 0 --only 7" in str(found)


def test_an_input_that_is_tried_again_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz.tempfile, "tempdir", str(tmp_path))
    target = next(target for target in TARGETS if target.name == "recipe")
    monkeypatch.setattr("sys.argv", ["fuzz", "--target", "recipe", "--seed", "3", "--only", "5"])
    assert fuzz.main() == 0
    kept, summary = capsys.readouterr().out.splitlines()
    fuzz.written(target, tmp_path / "again", 3, 5)
    assert Path(kept.partition(": ")[2]).read_bytes() == (tmp_path / "again" / target.file).read_bytes()
    assert summary == "1 targets, 1 inputs of each, 0 findings"


def test_errors_that_a_reader_documents_are_no_findings() -> None:
    good = Target(
        "good", lambda folder: (folder / "a").write_text("a"), "a", of_bytes, _raises(CheckpointError("no"))
    )
    assert not list(findings(good, 0, 0, 3))


def test_inputs_depend_on_their_number_alone(tmp_path: Path) -> None:
    contents = []
    for number in (3, 4, 3):
        fuzz.written(TARGETS[0], tmp_path / "input", 0, number)
        contents.append((tmp_path / "input" / TARGETS[0].file).read_bytes())
    assert contents[1] != contents[0]
