from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text.tokenizers import CHATML, byte_tokenizer

from windlass.checkpoint.files import Files
from windlass.text.encoder import EncodedRows
from windlass.text.prepare_text import prepare_text
from windlass.text.summary import TextSummary
from windlass.text.text_options import TextOptions
from windlass.text.token_rows import TokenRows
from windlass.text.token_store import TokenStore, default_cache

KEY = "ab" * 32


def prepared() -> tuple[TokenRows, TextSummary]:
    rows = TokenRows.of([EncodedRows([[1, 2], [3]], [[-100, 2], [3]])])
    return rows, TextSummary.of(rows, truncated=1, dropped=2)


def never() -> Any:
    raise AssertionError("prepared again")


def same(one: TokenRows, other: TokenRows) -> bool:
    return list(one) == list(other) and np.array_equal(one.offsets, other.offsets)


def test_what_was_prepared_is_found_again(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "new")
    rows, summary = store.get(KEY, prepared)
    again, counts = TokenStore(tmp_path / "new").get(KEY, never)
    assert same(rows, again)
    assert counts == summary == prepared()[1]
    assert [p.name for p in store.folder.iterdir()] == [store.path(KEY).name], (
        "no lock and no temporary folder"
    )


def test_rows_without_tokens_are_kept_too(tmp_path: Path) -> None:
    empty = TokenRows.of([])
    TokenStore(tmp_path).get(KEY, lambda: (empty, TextSummary.of(empty, 3, 3)))
    rows, summary = TokenStore(tmp_path).get(KEY, never)
    assert (len(rows), summary.dropped, summary.histogram) == (0, 3, ())


@pytest.mark.parametrize("damage", ["short", "other key", "no JSON"])
def test_a_damaged_folder_is_prepared_again(tmp_path: Path, damage: str) -> None:
    store = TokenStore(tmp_path)
    store.get(KEY, prepared)
    manifest = store.path(KEY) / "manifest.json"
    if damage == "short":
        (store.path(KEY) / "labels.bin").write_bytes(b"\0" * 4)
    elif damage == "other key":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "key": KEY[:32] + "0" * 32}))
    else:
        manifest.write_text("{")
    calls = []
    rows, _ = store.get(KEY, lambda: calls.append(1) or prepared())  # type: ignore[func-returns-value]
    assert calls == [1]
    assert same(rows, prepared()[0])
    assert same(store.get(KEY, never)[0], rows)


def test_a_folder_that_cannot_be_written_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert same(TokenStore(tmp_path / "file" / "text").get(KEY, prepared)[0], prepared()[0])

    def full(self: Files, operation: str, path: Path) -> None:
        if path.name == "labels.bin":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Files, "before", full)
    assert same(TokenStore(tmp_path / "full").get(KEY, prepared)[0], prepared()[0])
    assert caplog.records[0].getMessage().startswith("prepared text cannot be kept (")
    assert "was not kept" in caplog.records[1].getMessage()
    assert not TokenStore(tmp_path / "full").path(KEY).exists()


def test_an_interrupted_preparation_leaves_nothing_to_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Files, operation: str, path: Path) -> None:
        if operation == "rename":
            raise KeyboardInterrupt

    store = TokenStore(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Files, "before", fails)
        with pytest.raises(KeyboardInterrupt):
            store.get(KEY, prepared)
    assert not store.path(KEY).exists()
    assert same(store.get(KEY, prepared)[0], prepared()[0])


def test_one_prepares_and_the_others_wait(tmp_path: Path) -> None:
    calls: list[int] = []
    began, may_end = threading.Event(), threading.Event()

    def slow() -> tuple[TokenRows, TextSummary]:
        calls.append(1)
        began.set()
        assert may_end.wait(60)
        return prepared()

    found: list[TokenRows] = []
    threads = [
        threading.Thread(target=lambda: found.append(TokenStore(tmp_path).get(KEY, slow)[0]), daemon=True)
        for _ in range(3)
    ]
    threads[0].start()
    assert began.wait(60)
    for thread in threads[1:]:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert calls == [1]
    assert len(found) == 3
    assert all(same(rows, found[0]) for rows in found)


def test_a_preparation_is_cached_by_all_that_decides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    tokenizer = byte_tokenizer(CHATML)
    rows = [{"text": "one"}, {"text": "two"}]

    def folders(given: Any, **options: Any) -> int:
        prepare_text(given, tokenizer, TextOptions(**options), cache=tmp_path)
        return len(list(tmp_path.iterdir()))

    assert folders(rows) == 1
    assert folders([dict(row) for row in rows], num_proc=1) == 1
    assert folders(rows, max_length=2) == 2
    assert folders(rows[::-1]) == 3
    tokenizer.save_pretrained(tmp_path.with_name("tokenizer"))
    tokenizer = type(tokenizer).from_pretrained(tmp_path.with_name("tokenizer"))
    assert folders(rows) == 3, "the same tokenizer, from elsewhere"
    tokenizer.add_tokens(["two"])
    assert folders(rows) == 4
    table = datasets.Dataset.from_list(rows * 3)
    assert folders(table) == folders(datasets.Dataset.from_list(rows * 3)) == 5
    assert folders(table.select([0, 1, 2])) == 6
    assert folders(rows, formatting_func=lambda row: row["text"] + "!") == 7
    assert folders(rows, formatting_func=lambda row: row["text"] + "!") == 7
    assert folders([{"text": "one", "more": object()}]) == 7, "what has no JSON form is not cached"
    tokenizer.split_special_tokens = True  # "<eos>" is tokenized as five letters
    assert folders(rows) == 8
    tokenizer.split_special_tokens = False
    assert list(prepare_text(table, tokenizer, cache=tmp_path).dataset) == list(
        prepare_text(table, tokenizer).dataset
    )


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_HOME", "/somewhere")
    assert default_cache() == Path("/somewhere/text")


PROCESS = """
import sys, time
from pathlib import Path
from tests.text.test_token_store import KEY, never, prepared
from windlass.text.token_store import TokenStore
folder, is_first = Path(sys.argv[1]), sys.argv[2] == "first"

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def slow():
    (folder / "begun").touch()
    wait_for("other")
    return prepared()

if not is_first:
    wait_for("begun")
    (folder / "other").touch()
rows, _ = TokenStore(folder / "store").get(KEY, slow if is_first else never)
print(list(rows))
"""


def test_another_process_waits_for_the_one_that_prepares(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), name],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    found = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], found
    assert found[0][0] == found[1][0] == f"{list(prepared()[0])}\n"
