"""What a script's own code writes for a checkpoint before its folder exists."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError

_PREFIX = ".windlass-hooks-"


class ScriptFiles:
    """A folder for the files of save hooks and of an overridden `save_model`, which every rank calls.

    Attributes:
        folder: has the name of the checkpoint, which scripts look at.
    """

    def __init__(self, store: Store, step: int) -> None:
        name = store.path_for(step).name
        self._outer = store.root / f"{_PREFIX}{name}"
        self.folder = self._outer / name
        self._store = store

    def make(self) -> None:
        """Create the folder on the writer rank."""
        if self._store.is_writer:
            self.folder.mkdir(parents=True)

    def write_by(self, write: Callable[[Path], None]) -> None:
        """Call `write` with an empty folder on every rank: on the writer rank this one, on others one that is removed,
        so that no two write the same file. For a run, which has locked the store: what killed ones left is removed.
        """
        self._clear_left()
        self.make()
        if self._store.is_writer:
            write(self.folder)
            return
        with tempfile.TemporaryDirectory() as outer:
            folder = Path(outer, self.folder.name)
            folder.mkdir()
            write(folder)

    def leave_out(self, name: str) -> None:
        """Remove a file, if there is one of this name, before it is moved."""
        if self._store.is_writer:
            (self.folder / name).unlink(missing_ok=True)

    def names(self) -> set[str]:
        """The files that were written, by relative name."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if not path.is_dir()}

    def clear(self) -> None:
        """Remove what was written."""
        if self._store.is_writer and self._outer.exists():
            shutil.rmtree(self._outer, ignore_errors=True)

    def _clear_left(self) -> None:
        """Remove what saves of all steps have left: that of a killed process may not be saved again."""
        if self._store.is_writer and self._store.root.exists():
            for path in self._store.root.iterdir():
                if re.fullmatch(re.escape(_PREFIX) + self._store.pattern, path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def move_into(self, draft: Path) -> None:
        """Move all files to the folder of the checkpoint, which must not have files of the same names."""
        for path in sorted(self.folder.rglob("*")):
            target = draft / path.relative_to(self.folder)
            if path.is_dir() and not path.is_symlink():
                target.mkdir(exist_ok=True)
            elif target.exists():
                raise CheckpointError(
                    f"a save hook or save_model wrote {target.name}, which is also a file of the checkpoint: choose "
                    "another name, or remove the model's weights from the list that the hook receives"
                )
            else:
                path.rename(target)  # both folders are on one disk
        self.clear()
