"""Log-probabilities of the reference for a whole dataset, computed once over all ranks and kept on the disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from windlass.checkpoint.files import Files
from windlass.core.errors import CheckpointError
from windlass.core.locations import home_folder
from windlass.core.logs import get_job_logger
from windlass.dist.gang import Gang
from windlass.text.pair_rows import PairRows

logger = get_job_logger(__name__)
_HASH = hashlib.sha256().digest_size
_MOST = 1 << 34  # bytes that are read of such a file


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """Runs a reference over datasets."""

    accelerator: Any  # the devices
    all_ranks: Gang  # those that share the samples of a batch compute the same rows
    # Batch on the host -> log-probability of each of its sequences, shape (sequences,), all first answers of its rows
    # before all second ones
    compute: Callable[[Any], Tensor]
    collator: Callable[[list[Any]], Any]  # list of samples -> batch
    batch_size: int  # rows of a batch
    key: str | None  # what the results depend on, besides the rows; None: they are not kept

    def add_to(self, rows: PairRows, names: Sequence[str]) -> PairRows:
        """Return `rows` with a column for each name: the log-probabilities of its answers. Collective."""
        path = None if self.key is None else _folder() / f"{_key_of(self.key, rows)}.bin"
        found = self._kept(path, (len(names), len(rows)))
        if found is None:
            found = self._computed(rows, len(names))
            if path is not None and self.accelerator.is_local_main_process:
                _keep(path, found)
            self.accelerator.wait_for_everyone()
        for name, values in zip(names, found, strict=True):
            rows = rows.with_numbers(name, values)
        return rows

    def _kept(self, path: Path | None, shape: tuple[int, int]) -> NDArray[np.float64] | None:
        """What is on the disk, if all ranks have it."""
        values = None if path is None else _read(path, shape)
        mine = torch.tensor([float(values is not None)], device=self.accelerator.device)
        if float(self.accelerator.gather(mine).min()) == 0.0:
            return None
        logger.info("using the log-probabilities of the reference that were computed before: %s", path)
        return values

    def _computed(self, rows: PairRows, width: int) -> NDArray[np.float64]:
        """Of each answer and row. Rows of one length are computed together; all ranks make as many forwards."""
        lengths = rows.lengths
        order = np.argsort(-(lengths[:, 0] + lengths[:, 1:].max(axis=1)), kind="stable")
        size, data = self.batch_size, self.all_ranks.over("data")
        is_first = self.all_ranks.over("model").rank == 0
        found = np.zeros((width, len(rows)))
        for start in range(0, len(order), size * data.size):
            group = order[start : start + size * data.size]
            mine = group[data.rank :: data.size]
            filled = np.resize(mine if len(mine) else group[:1], size)
            sums = self.compute(self.collator([rows[int(at)] for at in filled])).double().reshape(width, size)
            if is_first:
                found[:, mine] = sums[:, : len(mine)].cpu().numpy()
        return self.all_ranks.sum(torch.from_numpy(found)).numpy()


def weights_hash(model: nn.Module) -> str:
    """The SHA-256 of all parameters and buffers of a model that is not divided over ranks, in hex."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _folder() -> Path:
    return home_folder(os.environ) / "reference"


def _key_of(key: str, rows: PairRows) -> str:
    digest = hashlib.sha256(json.dumps([key, rows.answers, torch.__version__]).encode())
    for values in (rows.rows.flat["input_ids"], rows.lengths, rows.kept):
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:32]


def _read(path: Path, shape: tuple[int, int]) -> NDArray[np.float64] | None:
    """The numbers of a file; None if it is missing or damaged."""
    if not path.exists():
        return None
    try:
        content = Files().read(path, _MOST)
    except (CheckpointError, OSError):
        return None
    if (
        hashlib.sha256(content[_HASH:]).digest() != content[:_HASH]
        or len(content) != _HASH + 8 * shape[0] * shape[1]
    ):
        logger.warning("%s is damaged; the log-probabilities of the reference are computed again", path)
        return None
    return np.frombuffer(content[_HASH:], dtype="<f8").reshape(shape)


def _keep(path: Path, values: NDArray[np.float64]) -> None:
    content = np.ascontiguousarray(values, dtype="<f8").tobytes()
    files = Files()
    try:
        files.ensure_folder(path.parent)
        with files.replacing(path) as new:
            files.write(new, [hashlib.sha256(content).digest(), content])
    except OSError as error:
        logger.warning("the log-probabilities of the reference were not kept: %s", error)
