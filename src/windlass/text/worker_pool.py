"""Encode a dataset in worker processes.

Workers are new interpreters that import this package only: the user's script is not imported again, as it is by the
start methods of `multiprocessing`, and nothing is forked from a process that has threads. They read their part of the
dataset once, and send back arrays.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from windlass.core.logs import get_logger
from windlass.text.encoder import RowEncoder
from windlass.text.located_rows import RowError
from windlass.text.tables import has_records, is_table, unfilled
from windlass.text.token_rows import TokenRows

# Rows tokenized at once: enough for the threads of a fast tokenizer, few enough for the processor's cache.
BATCH = 256
_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """One batch of rows: its number, its rows as arrays, the rows read, truncated and dropped."""

    number: int
    rows: TokenRows
    read: int
    truncated: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A batch that could not be encoded.

    Attributes:
        row: that is invalid; None = the worker failed.
    """

    number: int
    message: str
    row: int | None = None


class DatasetPart:
    """The batches `first`, `first + step`, ... of a dataset.

    Args:
        dataset: a `datasets.Dataset` or a sequence of mappings.
    """

    def __init__(self, dataset: Any, first: int = 0, step: int = 1) -> None:
        starts = range(first * BATCH, len(dataset), step * BATCH)
        self._numbers = [start // BATCH for start in starts]
        self._sizes = [min(BATCH, len(dataset) - start) for start in starts]
        ids = [i for start, size in zip(starts, self._sizes, strict=True) for i in range(start, start + size)]
        if step == 1:
            self._rows = dataset
        else:
            self._rows = dataset.select(ids) if is_table(dataset) else [dataset[i] for i in ids]

    def encoded(self, encoder: RowEncoder) -> Iterator[EncodedBatch | Failure]:
        """Yield the batches in order, up to the first that fails."""
        at = 0
        for number, size in zip(self._numbers, self._sizes, strict=True):
            try:
                found = encoder(self._read(at, at + size), number * BATCH)
            except RowError as error:
                yield Failure(number, error.problem, error.row)
                return
            yield EncodedBatch(number, TokenRows.of([found]), size, found.truncated, found.dropped)
            at += size

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


def encode(
    dataset: Any, encoder: RowEncoder, workers: int, progress: Callable[[int], None]
) -> list[EncodedBatch]:
    """Return the encoded batches of a dataset, in order.

    Args:
        workers: processes; 1 = this one.
        progress: called with the number of rows done.

    Raises:
        RowError: the first row that cannot be encoded.
    """
    workers = min(workers, -(-len(dataset) // BATCH))
    pool = _started(dataset, encoder, workers) if workers > 1 else None
    source = DatasetPart(dataset).encoded(encoder) if pool is None else pool.batches()
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
    pool = _Pool(workers)
    try:
        pool.send([(encoder, DatasetPart(dataset, first, workers)) for first in range(workers)])
    except (AttributeError, TypeError, ValueError, ImportError) as error:  # what pickling raises
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

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "windlass.text.prepare_worker"]
        # One process a core: threads of the tokenizer would compete with the other workers.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) for _ in range(count)
        ]
        self._to = [_connection(process.stdin, writes=True) for process in self._processes]
        self._from = [_connection(process.stdout, writes=False) for process in self._processes]

    def send(self, parts: Sequence[tuple[RowEncoder, DatasetPart]]) -> None:
        for connection, part in zip(self._to, parts, strict=True):
            connection.send(list(sys.path))  # before what may have to be imported from there
            connection.send(part)

    def batches(self) -> Iterator[EncodedBatch | Failure]:
        """Yield batches as they arrive; a failure once no earlier batch can fail any more."""
        last: dict[Connection, float] = dict.fromkeys(self._from, -1)
        failure: Failure | None = None
        while any(number < (failure.number if failure else float("inf")) for number in last.values()):
            waiting = [c for c, number in last.items() if number < float("inf")]
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                found = self._received(connection)
                last[connection] = found.number if isinstance(found, EncodedBatch) else float("inf")
                if isinstance(found, Failure) and (failure is None or found.number < failure.number):
                    failure = found
                elif isinstance(found, EncodedBatch):
                    yield found
        if failure is not None:
            yield failure

    def _received(self, connection: Connection) -> EncodedBatch | Failure | None:
        try:
            found: EncodedBatch | Failure | None = connection.recv()
        except EOFError:
            code = self._processes[self._from.index(connection)].wait()
            return Failure(-1, f"a worker process of the preparation ended with exit code {code}")
        return found

    def close(self) -> None:
        """End the workers, which may be in the middle of a batch."""
        for connection in (*self._to, *self._from):
            connection.close()
        for process in self._processes:
            process.terminate()
            process.wait()


def _connection(stream: Any, *, writes: bool) -> Connection:
    """A connection with a descriptor of its own; the stream is closed."""
    descriptor = os.dup(stream.fileno())
    stream.close()
    return Connection(descriptor, readable=not writes, writable=writes)
