"""Encode a dataset in worker processes.

Workers are new interpreters that import this package only: the user's script is not imported again, as it is by the
start methods of `multiprocessing`, and nothing is forked from a process that has threads. They read their part of the
dataset once, and send back arrays. This process works too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from windlass.core.logs import get_logger, warn_once
from windlass.text.encoder import RowEncoder
from windlass.text.forms import RowError
from windlass.text.tables import has_records, is_table, unfilled
from windlass.text.token_rows import TokenRows

if sys.platform == "linux":
    import fcntl

# Rows tokenized at once: enough for the threads of a fast tokenizer, few enough for the processor's cache.
BATCH = 256
# Bytes of a pipe: a worker goes on while this process is busy with another batch. Linux gives no more to users.
_PIPE = 1 << 20
_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """One batch of rows: its number, its rows as arrays, how many were read and truncated, and which were dropped."""

    number: int
    rows: TokenRows
    read: int
    truncated: int
    dropped: list[int]


@dataclass(frozen=True, slots=True)
class Failure:
    """A batch that could not be encoded. `row` is invalid; None: the worker failed."""

    number: int
    message: str
    row: int | None = None


@dataclass(frozen=True, slots=True)
class UnreadPart:
    """What a worker sends if it cannot read its part, which has an object of a class of the user's script."""

    message: str


class DatasetPart:
    """The batches `first`, `first + step`, ... of a dataset. It is a `datasets.Dataset` or a sequence of mappings."""

    def __init__(self, dataset: Any, first: int = 0, step: int = 1) -> None:
        starts = range(first * BATCH, len(dataset), step * BATCH)
        self._sizes = {start // BATCH: min(BATCH, len(dataset) - start) for start in starts}
        self._first, self._step = first, step
        ids = [
            i for number, size in self._sizes.items() for i in range(number * BATCH, number * BATCH + size)
        ]
        if step == 1:
            self._rows = dataset
        else:
            self._rows = dataset.select(ids) if hasattr(dataset, "select") else [dataset[i] for i in ids]

    def __len__(self) -> int:
        return len(self._sizes)

    def encoded(self, encoder: RowEncoder) -> Iterator[EncodedBatch | Failure]:
        """Yield the batches in order, up to the first that fails."""
        for number in self._sizes:
            found = self.batch(number, encoder)
            yield found
            if isinstance(found, Failure):
                return

    def batch(self, number: int, encoder: RowEncoder) -> EncodedBatch | Failure:
        size = self._sizes[number]
        at = (number - self._first) // self._step * BATCH
        try:
            found = encoder(self._read(at, at + size), number * BATCH)
        except RowError as error:
            return Failure(number, error.problem, error.row)
        return EncodedBatch(number, TokenRows.of([found]), size, found.truncated, found.dropped)

    def _read(self, start: int, end: int) -> list[Any]:
        if not is_table(self._rows):
            return [self._rows[at] for at in range(start, end)]
        return as_rows(self._rows[start:end], self._rows.features)


def as_rows(columns: Any, features: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the rows of a mapping of columns; `features` are the columns' types, if they are known."""
    cleaned = {
        name: [unfilled(value, features[name]) for value in values]
        if features and has_records(features.get(name))
        else values
        for name, values in columns.items()
    }
    return [dict(zip(cleaned, values, strict=True)) for values in zip(*cleaned.values(), strict=True)]


def in_batches(stream: Any, step: Callable[..., Any], example: Any, made: Collection[str]) -> Any:
    """The stream that `step` makes of the columns and the numbers of `BATCH` rows; `example` is a row, and `made` are
    the columns of the result, which datasets before 3.3 would remove too.
    """
    columns = [name for name in stream.column_names or example if name not in made]
    return stream.map(step, with_indices=True, batched=True, batch_size=BATCH, remove_columns=columns)


def encode(
    dataset: Any, encoder: RowEncoder, workers: int, progress: Callable[[int], None] = lambda done: None
) -> list[EncodedBatch]:
    """Return the encoded batches of a dataset, in order. Raises RowError for the first row that cannot be encoded.

    Args:
        workers: processes, this one counted.
        progress: called with the number of rows done.
    """
    workers = min(workers, -(-len(dataset) // BATCH))
    pool = _started(dataset, encoder, workers) if workers > 1 else None
    whole = DatasetPart(dataset)
    source = whole.encoded(encoder) if pool is None else pool.batches(whole, encoder)
    found: list[EncodedBatch] = []
    done = 0
    try:
        for batch in source:
            if isinstance(batch, Failure):
                raise RuntimeError(batch.message) if batch.row is None else RowError(batch.row, batch.message)
            found.append(batch)
            done += batch.read
            progress(done)
    finally:
        if pool is not None:
            pool.close()
    return sorted(found, key=lambda batch: batch.number)


def _started(dataset: Any, encoder: RowEncoder, workers: int) -> _Pool | None:
    if sys.platform == "win32":
        _logger.warning("worker processes need a POSIX system; the dataset is prepared in this process")
        return None
    others, pool = workers - 1, _Pool()
    try:
        pool.start(others)
        pool.send([(encoder, DatasetPart(dataset, first, others)) for first in range(others)])
    # The system may have no further process or file to give, and objects raise what they like when they are pickled.
    except Exception as error:
        pool.close()
        _logger.warning(
            "the dataset is prepared in this process, for it cannot be sent to another: %s", error
        )
        return None
    except BaseException:
        pool.close()
        raise
    return pool


class _Pool:
    """Worker processes, each with a connection over its standard streams."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._to: list[Connection] = []
        self._from: list[Connection] = []
        self._open: list[Any] = []
        self._senders: list[threading.Thread] = []

    def start(self, count: int) -> None:
        # -P: nothing in the current folder comes before the standard library; `send` sends the paths of this process.
        command = [sys.executable, "-P", "-m", "windlass.text.prepare_worker"]
        # One process a core: threads of the tokenizer would compete with the other workers.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        for _ in range(count):
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
            self._processes.append(process)
            _enlarge(process.stdout)
            self._to.append(_connection(process.stdin, writes=True))
            self._from.append(_connection(process.stdout, writes=False))
        self._open = list(self._from)

    def send(self, parts: Sequence[tuple[RowEncoder, DatasetPart]]) -> None:
        """Send each worker its part, in threads: a worker reads it after it has imported what it needs."""
        paths = bytes(ForkingPickler.dumps(list(sys.path)))  # before what may have to be imported from there
        for connection, part in zip(self._to, parts, strict=True):
            contents = (paths, bytes(ForkingPickler.dumps(part)))
            self._senders.append(threading.Thread(target=_write, args=(connection, contents), daemon=True))
            self._senders[-1].start()

    def batches(self, whole: DatasetPart, encoder: RowEncoder) -> Iterator[EncodedBatch | Failure]:
        """Yield every batch once, in any order; a failure once no earlier batch can fail any more.

        Workers make the batches of their parts from the first one on, and this process those of `whole` from the last
        one on, until they meet. So it need not wait until the workers have started, nor for the slowest of them.
        """
        missing, last = set(range(len(whole))), len(whole) - 1
        failure: Failure | None = None
        while missing:
            while last not in missing:
                last -= 1
            for found in self._arrived() or [whole.batch(last, encoder)]:
                if isinstance(found, EncodedBatch):
                    if found.number in missing:
                        missing.remove(found.number)
                        yield found
                elif failure is None or found.number < failure.number:
                    failure = found
                    missing = {number for number in missing if number < found.number}
        if failure is not None:
            yield failure

    def _arrived(self) -> list[EncodedBatch | Failure]:
        """What workers have sent, at most one batch of each."""
        received = {connection: self._received(connection) for connection in wait(self._open, timeout=0)}
        self._open = [c for c in self._open if c not in received or isinstance(received[c], EncodedBatch)]
        return [found for found in received.values() if found is not None]

    def _received(self, connection: Any) -> EncodedBatch | Failure | None:
        try:
            found: EncodedBatch | Failure | UnreadPart | None = connection.recv()
        except (EOFError, OSError):  # at the end of a message, or in the middle of one
            code = self._processes[self._from.index(connection)].wait()
            return Failure(-1, f"a worker process of the preparation ended with exit code {code}")
        if isinstance(found, UnreadPart):
            message = f"workers cannot read the dataset, which is prepared in this process: {found.message}"
            warn_once(_logger, message)  # each of them sends it
            return None
        return found

    def close(self) -> None:
        """End the workers, which may be in the middle of a batch."""
        for process in self._processes:
            process.kill()  # a shell may have all of its programs ignore SIGTERM
            process.wait()
        for sender in self._senders:
            if sender.is_alive():  # Ctrl-C may have come before it started, and then it cannot be joined
                sender.join()
        for connection in (*self._to, *self._from):
            connection.close()


def _write(connection: Connection, contents: Sequence[bytes]) -> None:
    with contextlib.suppress(OSError):  # the worker has ended, which reading from it reports
        for content in contents:
            connection.send_bytes(content)


def _enlarge(stream: Any) -> None:
    """Let a pipe hold more, where the system can and has not given this user as much as it gives."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, _PIPE)


def _connection(stream: Any, *, writes: bool) -> Connection:
    """A connection with a new descriptor; the stream is closed."""
    descriptor = os.dup(stream.fileno())
    stream.close()
    return Connection(descriptor, readable=not writes, writable=writes)
