"""Feeds mutated files and messages to every reader of bytes that others may have written.

    python -m tests.fuzz                                 some inputs of each target, as the default tests do
    python -m tests.fuzz --minutes 30                    the same for longer, with other random numbers
    python -m tests.fuzz --target NAME --seed S --only N   one input again, whose file is kept

A target prepares valid files, names the one that is mutated, and reads them. It may return anything or refuse with an
error of the kind it documents. Every other error, more than `MEMORY` bytes and more than `SECONDS` of the processor are
findings. Inputs depend on target, seed and number alone.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch
from tests.callbacks.killed_files import LEFT, killed_run, status_of
from tests.callbacks.test_report import failed_run, report_of
from tests.checkpoint.faults import save, write_parts
from tests.checkpoint.test_malicious_places import foreign, layer, offload, read_foreign, split_weights
from tests.compat.test_hostile_deepspeed_folders import MODEL, OPTIMIZER
from tests.compat.test_hostile_deepspeed_folders import write as write_deepspeed
from tests.text.test_token_store import KEY, packed

from windlass.callbacks.run_record import RECORD
from windlass.checkpoint import run_lock
from windlass.checkpoint.codec import load_state
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import read_manifest
from windlass.checkpoint.run_lock import LOCK_NAME, RunLock
from windlass.checkpoint.sharded import open_parts
from windlass.checkpoint.stored import load_folder, open_folder, open_weights
from windlass.checkpoint.tensor_file import open_tensors
from windlass.checkpoint.weights import save_weights
from windlass.compat.big_models.offloaded import OffloadedWeightsLoader
from windlass.compat.readers.torch_file import open_torch_file
from windlass.config import documents
from windlass.config.kinds import read_document
from windlass.core.errors import WindlassError
from windlass.core.world import World
from windlass.dist.rendezvous import Arrival
from windlass.dist.signed_store import SignedStore
from windlass.dist.wire import pack, unpack
from windlass.hub.fetching import fetched_before
from windlass.hub.staging import STAGING
from windlass.recipes.from_files import parse_file
from windlass.recipes.readers import read_records
from windlass.recipes.schema import DataSpec
from windlass.text.token_store import TokenStore
from windlass.trainer.card import earlier_head

MEMORY, SECONDS = 1 << 30, 10  # of one input, beside what the process has
INPUTS = 15  # of each target, in the default tests
Mutation = Callable[[random.Random, bytes], bytes]

NUMBERS = (0, -1, 1, 255, 1 << 15, 1 << 31, -(1 << 31), (1 << 63) - 1, 1 << 64, 10**400, 0.5, 1e308, -0.0)
VALUES: tuple[Any, ...] = (
    *NUMBERS, None, True, "", "a" * 5000, "../../etc/passwd", "\0", "\ud800", "NaN", [], [[]], {}, {"": {}}, [None] * 50
)  # fmt: skip
WORDS = (
    b"", b"\0", b"\xff" * 9, b"-1", b"1e999", b"99999999999999999999", b"null", b"true", b'""', b"[" * 3000, b"{", b"}",
    b"!!int ''", b"&a [*a]", b"<<: *a", b"---\n", b"\r\n", b'"', b",", b"\xef\xbb\xbf", b"NaN", b"1_000", b"0x", b"../",
)  # fmt: skip


# --- mutations


def of_bytes(chance: random.Random, data: bytes) -> bytes:
    """Flip, overwrite, cut, repeat or insert, some times."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, size = chance.randrange(len(found) + 1), chance.choice((1, 2, 4, 8, 64))
        match chance.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                number = chance.choice([n for n in NUMBERS if isinstance(n, int) and 0 <= n < 1 << 64])
                found[at : at + 8] = number.to_bytes(8, "little")
            case 2:
                del found[at : at + chance.choice((1, size, len(found)))]
            case 3:
                found[at:at] = found[at : at + size] * chance.choice((1, 2, 1000))
            case _:
                found[at:at] = chance.choice(WORDS)
    return bytes(found)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in [(tree, key), *_places(value)]]


def of_json(chance: random.Random, data: bytes) -> bytes:
    """Replace, remove or rename values of a JSON document, in most cases."""
    if chance.random() < 0.3:
        return of_bytes(chance, data)
    root = [json.loads(data)]
    for _ in range(chance.choice((1, 1, 2, 4))):
        holder, key = chance.choice(_places(root))
        if isinstance(holder, dict) and chance.random() < 0.3:
            value = holder.pop(key)
            if chance.random() < 0.5:
                holder[str(chance.choice(VALUES))[:5000]] = value
        else:
            holder[key] = chance.choice((*VALUES, *(holder[key] for holder, key in _places(root))))
        root = json.loads(json.dumps(root, skipkeys=True)) if root else [None]
    return json.dumps(root[0]).encode()


def sealed(chance: random.Random, data: bytes) -> bytes:
    """A manifest of a checkpoint or of prepared text, whose hash fits what is in it."""
    found = of_json(chance, data)
    try:
        body = json.loads(found)
        body.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return found
    # Each has its own way to write what is hashed.
    separators = (",", ":") if "format" in json.loads(data) else (", ", ": ")
    text = json.dumps(body, sort_keys=True, separators=separators)
    return json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def of_lines(chance: random.Random, data: bytes) -> bytes:
    """Mutate one line of JSON."""
    lines = data.splitlines()
    at = chance.randrange(len(lines))
    lines[at] = of_json(chance, lines[at])
    return b"\n".join(lines) + b"\n"


def of_header(chance: random.Random, data: bytes) -> bytes:
    """Mutate the header of a safetensors file, and write its new length."""
    length = int.from_bytes(data[:8], "little")
    if chance.random() < 0.3:
        return of_bytes(chance, data)
    header = of_json(chance, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def of_message(chance: random.Random, data: bytes) -> bytes:
    """Mutate the description of the value that a rank sends to others, and write its new length."""
    end = 8 + int.from_bytes(data[:8], "little")
    if chance.random() < 0.3:
        return of_bytes(chance, data)
    text = of_json(chance, data[8:end])
    padding = bytes(-(8 + len(text)) % 16)
    return len(text).to_bytes(8, "little") + text + padding + data[end + -end % 16 :]


def of_zip(chance: random.Random, data: bytes) -> bytes:
    """Mutate the pickle of a file of torch.save, and pack it again, so that checksums fit."""
    if chance.random() < 0.3:
        return of_bytes(chance, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in content if name.endswith("data.pkl"))
    content[name] = of_bytes(chance, content[name]) if chance.random() < 0.7 else _forged(chance)
    packed_again = io.BytesIO()
    with zipfile.ZipFile(packed_again, "w") as archive:
        for member, inside in content.items():
            archive.writestr(member, inside)
    return packed_again.getvalue()


def _forged(chance: random.Random) -> bytes:
    """A pickle of values that no reader expects there, or of opcodes in any order."""
    if chance.random() < 0.5:
        keys = ("state", "param_groups", "module", "optimizer_state_dict", "_last_lr", "scale", "weight")
        return pickle.dumps({chance.choice(keys): chance.choice(VALUES) for _ in range(3)}, 2)
    codes = b"().}]tNQRbacsue0q\x00h\x00\x81\x85\x86\x87\x88K\x01"
    names = (b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n")
    pieces = [
        bytes([chance.choice(codes)]) if chance.random() < 0.8 else chance.choice(names) for _ in range(60)
    ]
    return b"\x80\x02" + b"".join(pieces) + b"."


# --- targets


@dataclass(frozen=True, slots=True)
class Target:
    """A reader.

    Attributes:
        prepare: writes valid files into a folder.
        file: the one that is mutated, and then read by `read` with all others.
        errors: what it may raise.
    """

    name: str
    prepare: Callable[[Path], object]
    file: str
    mutate: Mutation
    read: Callable[[Path], object]
    errors: tuple[type[BaseException], ...] = (WindlassError,)


def _content(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content, "utf-8")


def _all_tensors(folder: Path) -> None:
    with open_weights(open_folder(folder)) as tensors:
        for name in tensors.names:
            tensors.read(name)


def _tensors(folder: Path) -> None:
    with open_tensors(folder / "model.safetensors", Files()) as file:
        for name in file.names:
            file.read(name)


def _parts(folder: Path) -> None:
    with open_parts(folder, "model", Files()) as tensors:
        for name in tensors.names:
            tensors.read(name)


def _torch_file(folder: Path) -> None:
    with open_torch_file(folder / "x.pt", Files()) as file:
        file.materialised(file.tree)


def _save_torch(folder: Path) -> None:
    tree = {
        "a": torch.arange(6.0).reshape(2, 3).t(),
        "b": [1, 2.5, None, ("x", b"y")],
        "c": torch.ones(3).bfloat16(),
    }
    torch.save(tree, folder / "x.pt")


def _deepspeed(folder: Path) -> None:
    inner = write_deepspeed(folder / "any", lambda model, optimizer: None)
    for path in inner.iterdir():
        path.rename(folder / path.name)
    inner.rmdir()


def _store(folder: Path) -> None:
    TokenStore(folder).get(KEY, packed)


def _from_store(folder: Path) -> None:
    """Damaged text is prepared again, so any error is one too many; and what it gives are rows within their arrays."""
    rows, _ = TokenStore(folder).get(KEY, packed)
    for row in rows:
        assert len(row["input_ids"]) == len(row["labels"]) == sum(row["seq_lengths"])


def _records(name: str, content: str) -> Target:
    read = lambda folder: read_records(str(folder / name), DataSpec())  # noqa: E731
    mutate = {"jsonl": of_lines, "json": of_json}.get(name.rpartition(".")[2], of_bytes)
    return Target(f"data {name}", _content(name, content), name, mutate, read)


def _parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["one", "two"], "label": [0, 1]}), folder / "rows.parquet")


def _message(folder: Path) -> None:
    """A value that an attacker put into the rendezvous store, and a signed one that is not what it should be."""
    content = (folder / "message").read_bytes()
    inner = torch.distributed.HashStore()
    store = SignedStore(inner, b"secret", "job")
    inner.set("job/arrival", content.decode("latin1"))
    try:
        store.get_json("arrival")
    except WindlassError:
        store.set("arrival", content)
        Arrival.read(0, store.get_json("arrival"))


def _lock(folder: Path) -> None:
    """The lock of a process that has ended."""
    lock = RunLock(folder)
    with lock:
        content = lock.path.read_bytes()
    lock.path.write_bytes(content.replace(b'"pid": ', b'"pid": 4'))


def _locked(folder: Path) -> None:
    run_lock.PATIENCE = run_lock.GRACE = 0.0  # no other run changes the file meanwhile
    with RunLock(folder):
        pass


def _packed(folder: Path) -> None:
    value = {
        "a": torch.ones(2, 3),
        "b": np.arange(4),
        "c": {1, 2},
        "d": ("x", b"yz", Path("p")),
        "e": {3: None},
    }
    (folder / "parcel").write_bytes(pack(value, {"note": 1}).numpy().tobytes())


def _unpacked(folder: Path) -> None:
    unpack(torch.frombuffer(bytearray((folder / "parcel").read_bytes()), dtype=torch.uint8))


def _fetched(folder: Path) -> None:
    (folder / STAGING).mkdir()
    (folder / STAGING / "fetched.json").write_text('{"hub:someone/run": "checkpoint-1"}')


ARRIVAL = '{"machine": "a", "host": "b", "address": "c", "rank": 0, "machines": 2, "round": 1}'
RECIPE = (
    "task: sft\nmodel: {name: gpt2}\ndata:\n  train: a.jsonl\n  mixture: {a: 0.5}\ntraining: {max_steps: 3}\n"
)
LAUNCH = "compute_environment: LOCAL_MACHINE\nnum_processes: 2\nmixed_precision: 'no'\nfsdp_config: {a: 1}\n"
CARD = "---\nlicense: mit\ntags: [a, b]\nmodel-index:\n- name: a\n---\n# A card\n"
STEP = "checkpoint-1"
TARGETS = [
    Target("checkpoint manifest", lambda f: save(f, 1), f"{STEP}/manifest.json", sealed,
           lambda f: read_manifest(f / STEP, Files())),
    Target("checkpoint state", lambda f: save(f, 1), f"{STEP}/optimizer.json", of_json,
           lambda f: load_state(f / STEP / "optimizer")),
    Target("safetensors", lambda f: save_weights(f, layer().state_dict()), "model.safetensors", of_header, _tensors),
    Target("parts index", lambda f: write_parts(f, "model", layer().state_dict(), World()), "model.parts.json", of_json,
           _parts),
    Target("split index", split_weights, "model.safetensors.index.json", of_json, lambda f: load_folder(f, layer())),
    Target("offload index", offload, "index.json", of_json,
           lambda f: [*OffloadedWeightsLoader(save_folder=f).values()]),
    Target("torch.save", _save_torch, "x.pt", of_zip, _torch_file),
    Target("DeepSpeed model", _deepspeed, MODEL, of_zip, _all_tensors),
    Target("DeepSpeed optimizer", _deepspeed, OPTIMIZER.format(0), of_zip, _all_tensors),
    Target("transformers state", foreign, "trainer_state.json", of_json, read_foreign),
    Target("transformers optimizer", foreign, "optimizer.pt", of_zip, read_foreign),
    Target("transformers schedule", foreign, "scheduler.pt", of_zip, read_foreign),
    Target("prepared text manifest", _store, f"{KEY[:32]}/manifest.json", sealed, _from_store, ()),
    Target("prepared text", _store, f"{KEY[:32]}/offsets.bin", of_bytes, _from_store, ()),
    Target("recipe", _content("a.yaml", RECIPE), "a.yaml", of_bytes, lambda f: documents.load(f / "a.yaml")),
    Target("launch file", _content("a.yaml", LAUNCH), "a.yaml", of_bytes, lambda f: parse_file(f / "a.yaml"),
           (ValueError,)),
    Target("JSON document", _content("a.json", '{"a": [1, {"b": 2.5}], "c": "d"}'), "a.json", of_json,
           lambda f: read_document(str(f / "a.json")), (ValueError,)),
    Target("model card", _content("README.md", CARD), "README.md", of_bytes, lambda f: earlier_head(f / "README.md"),
           ()),
    Target("record of a run", failed_run, RECORD, of_json, report_of),
    Target("rows of a run", failed_run, "metrics.jsonl", of_lines, report_of),
    *(Target(f"killed run {name}", killed_run, name, of_lines, status_of, ()) for name in LEFT),
    Target("rendezvous message", _content("message", ARRIVAL), "message", of_json, _message,
           (WindlassError, ValueError)),
    Target("message of a rank", _packed, "parcel", of_message, _unpacked),
    Target("lock of a run", _lock, LOCK_NAME, of_json, _locked),
    Target("note of a download", _fetched, f"{STAGING}/fetched.json", of_json,
           lambda f: fetched_before("hub:someone/run", f)),
    _records("rows.jsonl", '{"text": "one", "label": 0}\n{"text": "two", "label": 1}\n'),
    _records("rows.json", '[{"text": "one", "label": 0}, {"text": "two", "label": 1}]'),
    _records("rows.csv", 'text,label\n"one, two",0\nthree,1\n'),
    _records("rows.tsv", "text\tlabel\none\t0\nthree\t1\n"),
    _records("rows.txt", "one\ntwo\n"),
    Target("data rows.parquet", _parquet, "rows.parquet", of_bytes,
           lambda f: read_records(str(f / "rows.parquet"), DataSpec())),
]  # fmt: skip


# --- running


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that a reader did not refuse in the right way."""

    target: str
    seed: int
    number: int
    what: str

    def __str__(self) -> str:
        again = f"python -m tests.fuzz --target {self.target!r} --seed {self.seed} --only {self.number}"
        return f"{again}\n{self.what}"


def written(target: Target, folder: Path, seed: int, number: int) -> None:
    """Write input `number` of a target into a folder, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    target.prepare(folder)
    chance = random.Random(f"{target.name}/{seed}/{number}")
    path = folder / target.file
    path.write_bytes(target.mutate(chance, path.read_bytes()))


def _attempt(target: Target, folder: Path) -> str:
    """Read an input; return what is wrong with how it ended, empty if nothing is."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.read(folder)
    except target.errors:
        return ""
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


def _work(target: Target, folder: Path, seed: int, numbers: range, note: Path) -> None:
    """Read inputs in this process, which is ended by one that takes too long; `note` has the last one."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for number in numbers:
        written(target, folder, seed, number)
        note.write_text(f"{number}\n")
        what = _attempt(target, folder)
        note.write_text(f"{number}\n{what}")
        if what:
            return


def findings(target: Target, seed: int, first: int, end: int) -> Iterator[Finding]:
    """Try the inputs from `first` up to `end`, in forks of this process; each finding ends one."""
    with tempfile.TemporaryDirectory(prefix="windlass-fuzz-") as name:
        note = Path(name) / "note"
        while first < end:
            note.write_text(f"{first}\n")
            child = os.fork()
            if child == 0:
                try:
                    sys.stderr = io.StringIO()  # warnings of what is damaged
                    _work(target, Path(name) / "input", seed, range(first, end), note)
                finally:
                    os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            number, _, what = note.read_text().partition("\n")
            if status:
                what = f"the process ended with {status}; signal {signal.SIGPROF:d} is {SECONDS} s of the processor"
            if what:
                yield Finding(target.name, seed, int(number), what)
            first = int(number) + 1


def main() -> int:
    """Return 1 if there are findings, which are printed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, help="try inputs for so long, in turn; default: some of each target"
    )
    parser.add_argument("--target", default="", help="a part of the names of targets; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of the one input to try")
    options = parser.parse_args()
    chosen = [target for target in TARGETS if options.target in target.name]
    if not chosen:
        parser.error(f"--target {options.target}: no target has this in its name")
    end = time.monotonic() + 60 * (options.minutes or 0)
    first, step, count = options.only or 0, 1 if options.only is not None else INPUTS, 0
    while True:
        for target in chosen:
            for finding in findings(target, options.seed, first, first + step):
                print(finding, flush=True)
                count += 1
            if options.only is not None:
                folder = Path(tempfile.mkdtemp(prefix="windlass-fuzz-input-"))
                written(target, folder, options.seed, options.only)
                print(f"{target.name}: {folder / target.file}")
        first += step
        if options.only is not None or time.monotonic() >= end:
            break
    tried = 1 if options.only is not None else first
    print(f"{len(chosen)} targets, {tried} inputs of each, {count} findings")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
