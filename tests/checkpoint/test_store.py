from __future__ import annotations

import errno
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.faults import CountingFiles, Ranks, failing, newest, save, state_of

from windlass.checkpoint import manifest
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import MANIFEST_NAME, read_manifest
from windlass.checkpoint.staged import StagedCheckpoint
from windlass.checkpoint.store import SaveDropped, Store
from windlass.core.errors import CheckpointError
from windlass.dist.ending import exchanging
from windlass.dist.gang import Gang


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 9 and 10 (whose names sort the other way round)."""
    save(tmp_path, 9, limit=None)
    save(tmp_path, 10, limit=None)
    return tmp_path


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def test_list_is_ordered_by_step_and_knows_what_is_inside(two: Path) -> None:
    listed = Store(two).list()
    assert [info.step for info in listed] == [9, 10]
    assert listed[0].meta == {"best_metric": 9.0}
    assert listed[0].world_size == 1
    assert set(listed[0].files) == {
        "optimizer.json", "optimizer.safetensors", "rank-00000.json", "rank-00000.safetensors",
        "model.safetensors", "config.json",
        "tokenizer/vocab.txt",
    }  # fmt: skip
    assert listed[0].nbytes == sum(
        p.stat().st_size for p in files_of(listed[0].path) if p.name != MANIFEST_NAME
    )


def test_a_save_reads_the_manifest_of_each_earlier_checkpoint_twice_at_most(two: Path) -> None:
    """Once for the number of the new one, once for retention; a long run may keep hundreds."""

    class Reads(Files):
        def read(self, path: Path, limit: int) -> bytes:
            found[str(path.relative_to(two))] += 1
            return super().read(path, limit)

    found: Counter[str] = Counter()
    save(two, 11, Reads(), limit=None)
    assert found[f"checkpoint-9/{MANIFEST_NAME}"] == found[f"checkpoint-10/{MANIFEST_NAME}"] == 2


def test_an_absent_root_is_an_empty_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "nothing")
    assert store.list() == []
    assert store.newest_verified() == (None, [])
    with pytest.raises(CheckpointError, match=r"No valid checkpoint found in output directory \(.*nothing\)"):
        store.resume_point(True)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def link(path: Path) -> None:
    elsewhere = path.parent.parent.parent / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable[[Path], None]] = [flip, truncate, empty, grow, link, folder, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_to_any_file_is_found_and_named_and_the_older_one_is_taken(
    damage: Callable[[Path], None], two: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for index in range(len(files_of(two / "checkpoint-10"))):
        root = tmp_path_factory.mktemp("damaged") / "run"
        shutil.copytree(two, root)
        store, path = Store(root), files_of(root / "checkpoint-10")[index]
        damage(path)
        with pytest.raises(
            CheckpointError, match=r"Can't find a valid checkpoint at .*checkpoint-10: "
        ) as caught:
            store.verify(root / "checkpoint-10")
        assert path.name in str(caught.value)
        with pytest.raises(CheckpointError):
            store.resume_point(root / "checkpoint-10")  # exactly that one, or nothing
        found, skipped = store.newest_verified()
        assert found == root / "checkpoint-9"
        assert [where for where, _ in skipped] == [root / "checkpoint-10"]
        assert path.name in skipped[0][1]


def test_every_single_byte_of_the_manifest_counts(fast_disk: Path) -> None:
    save(fast_disk, 10)
    path = fast_disk / "checkpoint-10" / MANIFEST_NAME
    good = path.read_bytes()
    body = json.loads(good)
    for position in range(len(good)):
        data = bytearray(good)
        data[position] ^= 1
        path.write_bytes(data)
        try:
            read_manifest(path.parent, Files())
        except CheckpointError:
            continue
        assert json.loads(bytes(data)) == body  # white space alone may differ unnoticed


def test_a_checkpoint_of_too_many_files_is_refused_when_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 300)
    with pytest.raises(CheckpointError, match="2 files are too many for one checkpoint"):
        Store(tmp_path).write(1, {}, lambda staged: [staged.write_state(name, {}) for name in "ab"])


def test_resume_says_what_it_skipped_and_why(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("windlass.checkpoint.store"), "warning", lambda *a: said.append(a[0] % a[1:])
    )
    (two / "checkpoint-11").mkdir()
    flip(two / "checkpoint-10" / "model.safetensors")
    assert Store(two).resume_point(True).path == two / "checkpoint-9"
    assert "checkpoint-11" in said[0]
    assert "has no manifest.json" in said[0]
    assert "checkpoint-10/model.safetensors is damaged" in said[0]


def test_a_path_of_a_run_says_which_checkpoints_it_holds(two: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none itself: name one of them, such as .*checkpoint-10$"):
        Store(two.parent).resume_point(str(two))


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"Can't find a valid checkpoint at .*checkpoint-5: there is no such folder"
    ):
        Store(tmp_path).resume_point(str(tmp_path / "checkpoint-5"))


def test_a_renamed_or_linked_checkpoint_is_not_taken_for_another_step(two: Path) -> None:
    (two / "checkpoint-10").rename(two / "checkpoint-99")
    (two / "checkpoint-50").symlink_to(two / "checkpoint-9")
    store = Store(two)
    assert [info.step for info in store.list()] == [9]
    found, skipped = store.newest_verified()
    assert found == two / "checkpoint-9"
    assert "manifest is of step 10" in skipped[0][1]
    assert "symbolic link" in skipped[1][1]
    assert store.resume_point(str(two / "checkpoint-50")).path == two / "checkpoint-9", "named by the user"


def test_a_copy_elsewhere_under_another_name_is_a_checkpoint(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "checkpoint-9", tmp_path / "keep")
    assert Store(tmp_path).verify(tmp_path / "keep").step == 9


def test_a_foreign_folder_in_the_way_is_kept_aside(tmp_path: Path) -> None:
    for content in ("one", "two"):
        foreign = tmp_path / "checkpoint-3"
        if foreign.exists():
            shutil.rmtree(foreign)
        foreign.mkdir()
        (foreign / "optimizer.pt").write_text(content)
        assert save(tmp_path, 3) == foreign
        assert newest(tmp_path) == 3
    assert (tmp_path / "checkpoint-3.aside" / "optimizer.pt").read_text() == "one"
    assert (tmp_path / "checkpoint-3.aside1" / "optimizer.pt").read_text() == "two"
    foreign.rename(tmp_path / "kept")
    foreign.symlink_to(tmp_path / "kept")
    save(tmp_path, 3)
    assert (tmp_path / "checkpoint-3.aside2").readlink() == tmp_path / "kept", "a link to one is not one"


def test_an_empty_folder_in_the_way_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    assert save(tmp_path, 3) == tmp_path / "checkpoint-3"
    assert newest(tmp_path) == 3
    assert not list(tmp_path.glob("*.aside*"))


def test_what_a_script_put_beside_a_replaced_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path, 2)
    path = tmp_path / "checkpoint-2"
    (path / "scores").mkdir()
    (path / "scores" / "words").write_text("mine")
    save(tmp_path, 2)
    assert (path / "scores" / "words").read_text() == "mine"
    # Killed before it was moved, and written again since.
    replaced = tmp_path / "replaced-checkpoint-2"
    shutil.copytree(path, replaced)
    (replaced / "scores" / "words").write_text("older")
    (replaced / "notes").write_text("mine too")
    save(tmp_path, 3, limit=None)
    assert [(path / name).read_text() for name in ("scores/words", "notes")] == ["mine", "mine too"]
    assert not replaced.exists()
    assert newest(tmp_path) == 3


def test_a_cut_off_replacement_is_found_under_its_own_name_and_mended(tmp_path: Path) -> None:
    save(tmp_path, 2)
    best = tmp_path / "checkpoint-2"
    best.rename(tmp_path / "replaced-checkpoint-2")
    assert Store(tmp_path).verify(best).step == 2
    best.mkdir()  # another program's, without a manifest
    assert Store(tmp_path).verify(best).path == tmp_path / "replaced-checkpoint-2"
    best.rmdir()
    save(tmp_path, 3, protected=[best])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert newest(tmp_path) == 3


@pytest.mark.parametrize("name", ["../up", "a/b", "", "rank-00001", "manifest", ".hidden", "x" * 200, "a\n"])
def test_names_of_parts_stay_inside_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot name a part"):
        Store(tmp_path).write(1, {}, lambda staged: staged.write_state(name, {}))
    assert list(tmp_path.iterdir()) == []


def test_a_part_is_written_once(tmp_path: Path) -> None:
    def twice(staged: StagedCheckpoint) -> None:
        staged.write_state("a", {})
        with pytest.raises(CheckpointError, match="'a' was written already"):
            staged.write_state("a", {})

    Store(tmp_path).write(1, {}, twice)


def _put(path: Path) -> None:
    path.write_text("{}")


def test_a_rank_whose_list_cannot_be_synced_has_not_sealed_for_the_writer_either(tmp_path: Path) -> None:
    """The writer commits a loop's checkpoint by what it sees: the rank that failed lets the folder be removed."""

    class Unsynced(Files):
        def before(self, operation: str, path: Path) -> None:
            if operation == "fsync" and path.name.endswith(".files.json"):
                raise OSError(errno.EDQUOT, "quota exceeded")

    target = tmp_path / "checkpoint-1"
    writer, other = (
        StagedCheckpoint(target, 1, {}, rank, 2, files) for rank, files in enumerate((Files(), Unsynced()))
    )
    writer.open()
    for staged in (writer, other):
        staged.write_rank_state({})
    writer.seal()
    with pytest.raises(OSError, match="quota"):
        other.seal()
    assert not writer.is_sealed_by_others()


def test_what_other_code_wrote_is_flushed_too(tmp_path: Path) -> None:
    def write(staged: StagedCheckpoint) -> None:
        (staged.folder / "tokenizer").mkdir()
        _put(staged.folder / "tokenizer" / "vocab.json")

    Store(tmp_path, files=(files := CountingFiles())).write(1, {}, write)
    assert {"fsync vocab.json", "fsync_folder tokenizer"} <= set(files.operations)


def test_other_codes_symlink_or_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        Store(tmp_path).write(1, {}, lambda staged: (staged.folder / "weights").symlink_to("/etc/hostname"))
    with pytest.raises(CheckpointError, match="the checkpoint's own"):
        Store(tmp_path).write(1, {}, lambda staged: _put(staged.folder / MANIFEST_NAME))
    assert Store(tmp_path).list() == []


def test_an_interrupt_drops_the_staged_checkpoint(two: Path) -> None:
    def interrupted(staged: StagedCheckpoint) -> None:
        staged.write_state("a", {})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Store(two).write(11, {}, interrupted)
    assert sorted(path.name for path in two.iterdir()) == ["checkpoint-10", "checkpoint-9"]


def test_too_little_room_fails_before_anything_is_written(two: Path) -> None:
    files = CountingFiles()
    with pytest.raises(OSError, match=r"needs 1,000,000,000,000,000,000 bytes and .* are free"):
        Store(two, files=files).write(11, {}, lambda staged: pytest.fail("it must not run"), needed=10**18)
    assert files.operations == []


def _write_as_rank(ranks: Ranks, root: Path, rank: int, files: Any = None) -> None:
    def write(staged: StagedCheckpoint) -> None:
        if rank == 0:
            staged.write_state("shared", state_of(4))
        staged.write_rank_state(state_of(4) | {"rank": rank})

    ranks.store(rank, root, files).write(4, {"who": "all"}, write)


@pytest.mark.parametrize("world", [2, 3])
def test_several_ranks_write_one_checkpoint(world: int, tmp_path: Path) -> None:
    ranks, files = Ranks(world), [CountingFiles() for _ in range(world)]
    assert ranks.run(lambda rank: _write_as_rank(ranks, tmp_path, rank, files[rank])) == [None] * world
    listed = "tmp-rank-00001.files.json"
    assert files[1].operations[-5:] == [
        "fsync_folder tmp-checkpoint-4", f"create {listed}", f"write {listed}", f"fsync {listed}", f"rename {listed}",
    ]  # fmt: skip
    info = Store(tmp_path).verify(tmp_path / "checkpoint-4")
    assert info.world_size == world
    assert {name for name in info.files if name.endswith(".json")} == {
        "shared.json",
        *(f"rank-{rank:05d}.json" for rank in range(world)),
    }
    assert sorted(p.name for p in files_of(info.path)) == sorted([*info.files, MANIFEST_NAME])


def test_a_rank_whose_others_are_in_another_exchange_does_not_vote(tmp_path: Path) -> None:
    class InAnotherExchange(Gang):
        def vote(self, ok: bool) -> bool:
            raise AssertionError

    def lost() -> None:
        raise RuntimeError("Connection closed by peer")

    @exchanging()
    def without_memory() -> None:
        raise MemoryError

    store = Store(tmp_path, all_ranks=InAnotherExchange())
    with pytest.raises(RuntimeError, match="closed by peer"):
        store.on_all_ranks(1, lost)
    with pytest.raises(MemoryError):
        store.on_all_ranks(1, without_memory)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_fault_on_any_rank_at_any_operation_drops_the_checkpoint_on_all(
    victim: int, fast_disk: Path
) -> None:
    counts = [CountingFiles(), CountingFiles()]
    ranks = Ranks(2)
    save(fast_disk / "counted", 1)
    ranks.run(lambda rank: _write_as_rank(ranks, fast_disk / "counted", rank, counts[rank]))
    for at in range(1, counts[victim].count + 1):
        _fail_at(fast_disk / str(at), victim, at)


def _fail_at(root: Path, victim: int, at: int) -> None:
    save(root, 1)
    ranks, faulty = Ranks(2), CountingFiles(at, failing())
    results = ranks.run(lambda rank: _write_as_rank(ranks, root, rank, faulty if rank == victim else None))
    assert isinstance(results[victim], OSError), at
    assert isinstance(results[1 - victim], SaveDropped), at
    if faulty.operations[-1] == f"fsync_folder {root.name}":  # the last one: the rename was done already
        assert Store(root).verify(root / "checkpoint-4").step == 4
    else:
        assert [path.name for path in root.iterdir()] == ["checkpoint-1"], at
    assert (
        newest(root) == 1
        if not (root / "checkpoint-4").exists()
        else Store(root).verify(root / "checkpoint-1")
    )
