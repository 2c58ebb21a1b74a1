"""What a job found out about the batches that fit, in a file that its next attempt reads."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.checkpoint.files import Files
from windlass.checkpoint.strict_json import dump, parse
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_job_logger

logger = get_job_logger(__name__)
FILE_NAME = "batch_sizes.json"
_LIMIT = 1 << 12  # bytes; a note has about two hundred


@dataclass(frozen=True, slots=True)
class MemoryNote:
    """Sizes in samples.

    Attributes:
        asked_train, asked_accumulation, asked_eval: the arguments under which it was found out.
        train, eval: the largest batches that may fit; None where nobody had to ask.
    """

    asked_train: int
    asked_accumulation: int
    asked_eval: int
    train: int | None
    eval: int | None


def write_note(folder: Path, note: MemoryNote) -> None:
    """Leave the note, whole or not at all. Several processes may do so at once; one of their notes stays."""
    files, target = Files(), folder / FILE_NAME
    partial = folder / f"{FILE_NAME}.{os.getpid()}.tmp"
    files.ensure_folder(folder)
    partial.unlink(missing_ok=True)
    files.write(partial, [dump(asdict(note), str(target))])
    files.rename(partial, target)
    files.sync_folder(folder)


def read_note(folder: Path, like: MemoryNote) -> dict[str, Any] | None:
    """The note that an earlier attempt left under the same arguments as `like`; None where there is none.

    One that is damaged is warned of and left out: it only spares finding out again.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        note = _checked(parse(Files().read(path, _LIMIT), str(path)))
    except CheckpointError as error:
        logger.warning("%s: batch sizes are found out anew", error)
        return None
    if _asked(note) != _asked(like):
        return None
    logger.warning(
        "%s notes that memory did not hold the batches asked for; training goes on with micro-batches of at most %s, "
        "evaluation with batches of at most %s. Remove that file to try the sizes asked for again",
        path, note.train or note.asked_train, note.eval or note.asked_eval,
    )  # fmt: skip
    return asdict(note)


def _asked(note: MemoryNote) -> tuple[int, int, int]:
    return note.asked_train, note.asked_accumulation, note.asked_eval


def _checked(values: Any) -> MemoryNote:
    names = MemoryNote.__dataclass_fields__
    if not isinstance(values, dict) or values.keys() != names.keys():
        raise CheckpointError(f"{FILE_NAME} does not hold the names of a note")
    for name, value in values.items():
        optional = value is None and not name.startswith("asked_")
        if not optional and (type(value) is not int or not 1 <= value <= 1 << 40):
            raise CheckpointError(f"{FILE_NAME}: {name} is no size")
    return MemoryNote(**values)
