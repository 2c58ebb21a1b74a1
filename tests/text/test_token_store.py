from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
    return rows, TextSummary.of(rows, truncated=1, dropped=[0, 3])


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
    TokenStore(tmp_path).get(KEY, lambda: (empty, TextSummary.of(empty, 3, [0, 1, 2])))
    rows, summary = TokenStore(tmp_path).get(KEY, never)
    assert (len(rows), summary.dropped, summary.histogram) == (0, 3, ())


def packed() -> tuple[TokenRows, TextSummary]:
    """Two packed rows, of two documents and of one."""
    ids = np.arange(5, dtype=np.int32)
    lengths, documents = np.array([2, 1, 2], dtype=np.int32), np.array([0, 2, 3])
    rows = TokenRows(ids, ids.copy(), np.array([0, 3, 5]), lengths, documents)
    return rows, TextSummary.of(rows, truncated=0)


def resealed(folder: Path, change: Callable[[dict[str, Any]], object] = lambda body: None) -> None:
    """Make the manifest fit the files, as an attacker who knows the layout would."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    for name, entry in body["files"].items():
        found = Files().digest(folder / name)
        entry.update(size=found.size, sha256=found.sha256)
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body))


def flip(path: Path, at: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def numbers(name: str, kind: str, *values: int) -> Callable[[Path], None]:
    """Other numbers in a file, with a manifest that fits."""

    def change(folder: Path) -> None:
        (folder / f"{name}.bin").write_bytes(np.array(values, dtype=kind).tobytes())
        resealed(folder)

    return change


def link(folder: Path, name: str) -> None:
    """The same content behind a symbolic link."""
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def earlier_version(folder: Path) -> None:
    body = json.loads((folder / "manifest.json").read_text())
    sizes = {name: entry["size"] for name, entry in body["files"].items()}
    kept = {**body["meta"], "sizes": sizes}
    (folder / "manifest.json").write_text(json.dumps(kept))


def pipe(folder: Path) -> None:
    (folder / "labels.bin").unlink()
    os.mkfifo(folder / "labels.bin")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit of a token": lambda folder: flip(folder / "input_ids.bin"),
    "a flipped bit of a label": lambda folder: flip(folder / "labels.bin", -1),
    "a flipped bit of an offset": lambda folder: flip(folder / "offsets.bin", 8),
    "other labels": lambda folder: (folder / "labels.bin").write_bytes(b"\2\0\0\0" * 5),
    "cut": lambda folder: (folder / "labels.bin").write_bytes(b"\0" * 4),
    "longer": lambda folder: (folder / "labels.bin").write_bytes(b"\0" * 24),
    "a missing file": lambda folder: (folder / "labels.bin").unlink(),
    "a link": lambda folder: link(folder, "input_ids.bin"),
    "a link for the manifest": lambda folder: link(folder, "manifest.json"),
    "a pipe": pipe,
    "another number of rows": lambda folder: flip(
        folder / "manifest.json", (folder / "manifest.json").read_bytes().index(b'"rows": ') + 8
    ),
    "no JSON": lambda folder: (folder / "manifest.json").write_text("{"),
    "a list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "deep JSON": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
    "an earlier version": earlier_version,
    "another file": lambda folder: resealed(folder, lambda body: body["files"].update({"../a": {}})),
    "no files": lambda folder: resealed(folder, lambda body: body.update(files={})),
    "a text for the files": lambda folder: resealed(folder, lambda body: body.update(files="labels")),
    "no summary": lambda folder: resealed(folder, lambda body: body["meta"].update(summary=None)),
    "offsets beyond the tokens": numbers("offsets", "<i8", 0, 3, 1_000_000),
    "negative offsets": numbers("offsets", "<i8", 0, -1_000_000, 5),
    "offsets that begin before the tokens": numbers("offsets", "<i8", -1_000_000, 3, 5),
    "falling offsets": numbers("offsets", "<i8", 0, 5, 3, 5),
    "no offsets": numbers("offsets", "<i8"),
    "offsets that end early": numbers("offsets", "<i8", 0, 3, 4),
    "fewer labels": numbers("labels", "<i4", 1, 2, 3),
    "documents beyond their lengths": numbers("documents", "<i8", 0, 2, 1_000_000),
    "negative documents": numbers("documents", "<i8", 0, -1_000_000, 3),
    "documents of other rows": numbers("documents", "<i8", 0, 3),
    "lengths of other rows": numbers("seq_lengths", "<i4", 1, 1, 3),
    "negative lengths": numbers("seq_lengths", "<i4", 4, -1, 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_prepared_again_with_one_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = TokenStore(tmp_path / "store")
    store.get(KEY, packed)
    DAMAGE[damage](store.path(KEY))
    calls = []
    rows, summary = store.get(KEY, lambda: calls.append(1) or packed())  # type: ignore[func-returns-value]
    assert calls == [1]
    assert same(rows, packed()[0])
    assert summary == packed()[1]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{store.path(KEY)} is damaged, and is prepared again: " in warning
    assert same(store.get(KEY, never)[0], rows)


def test_a_link_to_a_folder_is_replaced(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "store")
    store.get(KEY, prepared)
    store.path(KEY).rename(tmp_path / "elsewhere")
    store.path(KEY).symlink_to(tmp_path / "elsewhere")
    assert same(store.get(KEY, prepared)[0], prepared()[0])
    assert not store.path(KEY).is_symlink()
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir())


def test_a_folder_of_another_key_is_prepared_again(tmp_path: Path) -> None:
    """Its name has the first digits of the key only."""
    store = TokenStore(tmp_path)
    store.get(KEY, prepared)
    other = KEY[:32] + "0" * 32
    assert same(store.get(other, packed)[0], packed()[0])


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
    assert not [*(tmp_path / "full").glob("*")], "a full disk keeps nothing of it"
    with pytest.raises(OSError, match="No space left"):
        TokenStore(tmp_path / "full", must_keep=True).get(KEY, prepared)
    assert not [*(tmp_path / "full").glob("*")]


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
    assert store.path(KEY).exists(), "what the interrupted one left is replaced"


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


class _Whole:
    """A pre-tokenizer written in Python, which leaves texts whole."""

    def pre_tokenize(self, text: Any) -> None: ...


def test_a_preparation_is_cached_by_all_that_decides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets, tokenizers = pytest.importorskip("datasets"), pytest.importorskip("tokenizers")
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
    call = tokenizer.encode
    tokenizer.encode = lambda text, **kwargs: call(text, **kwargs)
    assert folders([{"text": "three"}]) == 8, "code of the script's is not cached"
    del tokenizer.encode
    kind = type(tokenizer)
    tokenizer.__class__ = type("Reversed", (kind,), {"__module__": "script"})
    assert folders([{"text": "three"}]) == 8
    tokenizer.__class__ = kind
    splitting = tokenizer.backend_tokenizer.pre_tokenizer
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(_Whole())
    assert folders([{"text": "three"}]) == 8
    tokenizer.backend_tokenizer.pre_tokenizer = splitting
    assert list(prepare_text(table, tokenizer, cache=tmp_path).dataset) == list(
        prepare_text(table, tokenizer).dataset
    )
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    talk = [{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}]
    assert folders(talk) == 9
    days = iter([datetime.date(2000, 1, 1), datetime.date(2000, 1, 2)])
    monkeypatch.setattr("windlass.text.prepare_text.date", SimpleNamespace(today=lambda: next(days)))
    assert (folders(talk), folders(talk)) == (10, 11), "the template writes the date into the text"


def test_conversations_whose_special_tokens_are_text_are_prepared_again(tmp_path: Path) -> None:
    """A tokenizer passes this setting on with its first call, and none is needed to look for a conversation."""
    pytest.importorskip("tokenizers")
    turns = [{"role": "user", "content": "a<eos>b"}, {"role": "assistant", "content": "c"}]

    def tokens(split: bool) -> int:
        tokenizer = byte_tokenizer(CHATML)
        tokenizer.split_special_tokens = split
        return len(prepare_text([{"messages": turns}], tokenizer, cache=tmp_path).dataset[0]["input_ids"])

    assert tokens(True) - tokens(False) == len("<eos>") - 1


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
