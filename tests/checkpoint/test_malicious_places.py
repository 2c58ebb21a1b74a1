"""The same enemy at every other place of the package where a file is read: nothing runs, nothing hangs, memory stays
bounded, and the error names the file.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.faults import save, write_parts
from tests.checkpoint.test_faults import in_child
from tests.checkpoint.test_malicious import CORPUS, LARGE, WITNESS, Bomb, huge_json, reseal, saved_by_torch

from windlass.callbacks.metrics_log import MetricsLogCallback
from windlass.checkpoint.files import Files
from windlass.checkpoint.foreign import open_foreign
from windlass.checkpoint.stored import load_folder, open_folder, open_weights
from windlass.checkpoint.tensor_file import open_tensors
from windlass.checkpoint.weights import save_weights
from windlass.cli.main import main
from windlass.compat.big_models.checkpoint_loading import load_checkpoint_in_model
from windlass.compat.big_models.offloaded import OffloadedWeightsLoader
from windlass.compat.parser import HfArgumentParser
from windlass.compat.readers.torch_file import open_torch_file
from windlass.config import documents
from windlass.config.kinds import read_document
from windlass.core.errors import CheckpointError
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.world import World
from windlass.recipes.from_files import parse_file
from windlass.trainer.batch_fitter import MemoryNote, read_note
from windlass.trainer.card import earlier_head
from windlass.trainer.reports import _earlier

SECONDS = 120  # a child that takes longer hangs


def layer() -> torch.nn.Module:
    return torch.nn.Linear(2, 3, bias=False)


# --- further attacks


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path) -> None:
    """To a file that is not the checkpoint's."""
    path.unlink(missing_ok=True)
    outside = path.parent.parent / "outside"
    outside.write_bytes(pickle.dumps(Bomb()))
    path.symlink_to(outside)


def torch_file_with_code(path: Path) -> None:
    torch.save({"state": {}, "param_groups": [], "more": Bomb()}, path)


def many_digits(path: Path) -> None:
    path.write_bytes(b'{"a": ' + b"9" * 10_000 + b"}\n")


def deep_lines(path: Path) -> None:
    path.write_bytes((b'{"step":' + b"[" * 100_000 + b"\n") * 3)


def yaml_tag(path: Path) -> None:
    path.write_text(f"a: !!python/object/apply:os.putenv [{WITNESS}, '1']\n")


def yaml_aliases(path: Path) -> None:
    """Each line holds the one before it twice."""
    lines = ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}" for i in range(1, 60))]
    path.write_text("\n".join(lines))


def yaml_merges(path: Path) -> None:
    lines = ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 60))]
    path.write_text("\n".join(lines))


def yaml_of_itself(path: Path) -> None:
    path.write_text("a: &a [*a, *a]\n")


BINARY = [*CORPUS, pipe, link, torch_file_with_code, many_digits]
SETTINGS = [
    attack for attack in CORPUS if attack.__name__ not in ("named_class", "wide_references")
] + [yaml_tag, yaml_aliases, yaml_merges, yaml_of_itself, many_digits]  # fmt: skip


# --- the places: what lies there when all is well, and who reads it


def split_weights(folder: Path, suffix: str = "safetensors") -> None:
    name = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    places = {"weight": f"{name}-00001-of-00001.{suffix}"}
    (folder / f"{name}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    if suffix == "bin":
        torch.save(layer().state_dict(), folder / places["weight"])
    else:
        save_weights(folder, layer().state_dict(), name=places["weight"])


def parts(folder: Path) -> None:
    write_parts(folder, "model", layer().state_dict(), World())


def foreign(folder: Path) -> None:
    """A folder of transformers' Trainer."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    save_weights(folder, model.state_dict())
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"_last_lr": [0.1]}, folder / "scheduler.pt")
    torch.save({"scale": 1.0, "_growth_tracker": 0}, folder / "scaler.pt")
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": 3, "epoch": 1.0, "log_history": []})
    )


def read_foreign(folder: Path) -> None:
    checkpoint, model = open_foreign(folder), layer()
    checkpoint.load_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load_optimizer_of(optimizer, model, with_rates=False)
    checkpoint.schedule_state()
    checkpoint.scaler_state()


def offload(folder: Path) -> None:
    save_weights(folder, layer().state_dict())
    entry = {"safetensors_file": "model.safetensors", "weight_name": "weight", "dtype": "float32"}
    (folder / "index.json").write_text(json.dumps({"weight": entry}))


def read_all_weights(folder: Path) -> None:
    with open_weights(open_folder(folder)) as tensors:
        for name in tensors.names:
            tensors.read(name)


def cut_back(folder: Path) -> None:
    callback = MetricsLogCallback(folder)
    callback.on_train_begin(None, TrainerState(global_step=3), TrainerControl())
    callback.take({"event": "log", "step": 4, "timing": {}}, None, TrainerState(global_step=4))


def nothing(folder: Path) -> None:
    """The attack makes the file."""


Place = tuple[Callable[[Path], None], str, Callable[[Path], object]]
BINARY_PLACES: list[Place] = [
    (split_weights, "model.safetensors.index.json", lambda f: load_folder(f, layer())),
    (split_weights, "model-00001-of-00001.safetensors", lambda f: load_folder(f, layer())),
    (split_weights, "model.safetensors.index.json", lambda f: load_checkpoint_in_model(layer(), f)),
    (split_weights, "model-00001-of-00001.safetensors", lambda f: load_checkpoint_in_model(layer(), f)),
    (lambda f: split_weights(f, "bin"), "pytorch_model.bin.index.json", lambda f: load_folder(f, layer())),
    (lambda f: split_weights(f, "bin"), "pytorch_model-00001-of-00001.bin", lambda f: load_folder(f, layer())),
    (lambda f: torch.save(layer().state_dict(), f / "pytorch_model.bin"), "pytorch_model.bin", read_all_weights),
    (parts, "model.parts.json", lambda f: load_folder(f, layer())),
    (parts, "model-rank-00000.safetensors", lambda f: load_folder(f, layer())),
    (foreign, "model.safetensors", read_foreign),
    (foreign, "optimizer.pt", read_foreign),
    (foreign, "scheduler.pt", read_foreign),
    (foreign, "scaler.pt", read_foreign),
    (foreign, "trainer_state.json", read_foreign),
    (offload, "index.json", lambda f: OffloadedWeightsLoader(save_folder=f)["weight"]),
    (offload, "model.safetensors", lambda f: OffloadedWeightsLoader(save_folder=f)["weight"]),
]  # fmt: skip
SETTINGS_PLACES: list[Place] = [
    (nothing, "recipe.yaml", lambda f: documents.load(f / "recipe.yaml")),
    (nothing, "recipe.json", lambda f: documents.load(f / "recipe.json")),
    (nothing, "launch.yaml", lambda f: parse_file(f / "launch.yaml")),
    (nothing, "launch.json", lambda f: parse_file(f / "launch.json")),
    (nothing, "fsdp.json", lambda f: read_document(str(f / "fsdp.json"))),
    (nothing, "arguments.json", lambda f: HfArgumentParser(()).parse_json_file(f / "arguments.json")),
    (nothing, "arguments.yaml", lambda f: HfArgumentParser(()).parse_yaml_file(f / "arguments.yaml")),
]
# What these hold is left out with a warning, or set aside: the run goes on without it.
LENIENT_PLACES: list[Place] = [
    (nothing, "metrics.jsonl", cut_back),
    (nothing, "batch_sizes.json", lambda f: read_note(f, MemoryNote(1, 1, 1, None, None))),
    (nothing, "all_results.json", lambda f: _earlier(f / "all_results.json")),
    (nothing, "README.md", lambda f: earlier_head(f / "README.md")),
]


def in_bounds(body: Callable[[], object]) -> None:
    """In a child: with little memory, and ended where it hangs."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), used + (3 << 30)))
    signal.alarm(SECONDS)
    body()


def attempt(read: Callable[[], object], name: str | None) -> int:
    """Run in a child: 0 where the reading was refused in the right words (`name` None: or gave anything at all)."""
    try:
        in_bounds(read)
    except (ValueError, OSError) as error:  # of which all of this package's errors are
        said = str(error)
        return 0 if name is None or name in said else 3
    return 0 if name is None else 2


def suffer(place: Place, attack: Callable[[Path], None], folder: Path, named: bool) -> int:
    prepare, name, read = place
    folder.mkdir()
    if read in (read_foreign, read_all_weights) or name.endswith((".bin", ".bin.index.json")):
        # Its forks share the process that reads such files, instead of starting one each.
        torch.save(None, folder.parent / "any.pt")
        with open_torch_file(folder.parent / "any.pt", Files()):
            pass
    prepare(folder)
    attack(folder / name)
    return in_child(lambda: os._exit(attempt(lambda: read(folder), name if named else None)))


def cases(places: list[Place], attacks: list[Any]) -> list[Any]:
    return [
        pytest.param(place, attack, id=f"{number}-{place[1]}-{attack.__name__}")
        for number, place in enumerate(places)
        for attack in attacks
        if not _needless(place[1], attack)
    ]


def _needless(name: str, attack: Any) -> bool:
    if attack is saved_by_torch:
        return name in ("scheduler.pt", "scaler.pt")  # which it is
    # Files of 256 MB are tried where the bound is one of its own.
    return attack in LARGE and attack is not huge_json and not name.startswith(("opt", "metrics", "rec"))


@pytest.mark.parametrize(("place", "attack"), cases(BINARY_PLACES, BINARY))
def test_files_of_checkpoints(place: Place, attack: Callable[[Path], None], tmp_path: Path) -> None:
    assert suffer(place, attack, tmp_path / "checkpoint-3", named=True) == 0
    assert WITNESS not in os.environ


@pytest.mark.parametrize(("place", "attack"), cases(SETTINGS_PLACES, SETTINGS))
def test_files_of_settings(place: Place, attack: Callable[[Path], None], tmp_path: Path) -> None:
    assert suffer(place, attack, tmp_path / "settings", named=False) == 0
    assert WITNESS not in os.environ


@pytest.mark.parametrize(("place", "attack"), cases(LENIENT_PLACES, [*SETTINGS, deep_lines, pipe]))
def test_files_that_a_run_can_do_without(
    place: Place, attack: Callable[[Path], None], tmp_path: Path
) -> None:
    assert suffer(place, attack, tmp_path / "run", named=False) == 0
    assert WITNESS not in os.environ


def test_the_places_are_read_when_nobody_attacks(tmp_path: Path) -> None:
    for number, (prepare, _, read) in enumerate(BINARY_PLACES):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        prepare(folder)
        read(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_paths_in_an_index_stay_inside(name: str, suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    save_weights(tmp_path, layer().state_dict(), name="secret.safetensors")
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"weight": name}}))
    readers: list[Callable[[], object]] = [lambda: load_folder(folder, layer())]
    readers.append(lambda: load_checkpoint_in_model(layer(), folder))
    for read in readers:
        with pytest.raises(CheckpointError):
            read()


def test_arguments_of_a_checkpoint_are_no_way_in(tmp_path: Path) -> None:
    """They are read to compare them, after everything else was restored."""
    from tests.trainer.small import Net, arguments, rows

    from windlass import Trainer

    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    Trainer(Net(), arguments(tmp_path / "run", **options), train_dataset=rows(8)).train()
    folder = tmp_path / "run" / "checkpoint-2"
    (folder / "training_args.json").write_bytes(b"[" * 100_000)
    reseal(folder)
    again = Trainer(Net(), arguments(tmp_path / "run", **options), train_dataset=rows(8))
    with pytest.raises(CheckpointError, match=r"training_args\.json is nested too deeply"):
        again.train(resume_from_checkpoint=True)


def test_a_name_of_torch_in_an_offload_index_is_not_looked_up(tmp_path: Path) -> None:
    offload(tmp_path)
    entry = {"safetensors_file": "model.safetensors", "weight_name": "weight", "dtype": "load"}
    (tmp_path / "index.json").write_text(json.dumps({"weight": entry}))
    with pytest.raises(CheckpointError, match="unknown dtype 'load'"):
        OffloadedWeightsLoader(save_folder=tmp_path)["weight"]


def every_command(run: Path) -> None:
    """None of them may end in a traceback; which of their exit codes it is they decide themselves."""
    folder = str(run / "checkpoint-1")
    commands = [
        ["ls", str(run)],
        ["verify", str(run)],
        ["diff", folder, folder],
        ["export", folder, str(run / "out.safetensors")],
        ["export", folder, str(run / "moments.safetensors"), "--tensors", "optimizer"],
        ["prune", str(run), "--keep-last", "1"],
    ]
    for command in commands:
        assert main(["checkpoint", *command]) in (0, 1, 2), command


@pytest.mark.parametrize("attack", [a for a in BINARY if a not in LARGE], ids=lambda attack: attack.__name__)
@pytest.mark.parametrize(
    "name", ["manifest.json", "model.safetensors", "optimizer.json", "trainer_state.json"]
)
def test_the_commands_on_checkpoints(
    name: str, attack: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoint-1"
    (folder / "trainer_state.json").write_text("{}")
    reseal(folder, lambda body: body["files"].update({"trainer_state.json": {"size": 2, "sha256": ""}}))
    reseal(folder)
    attack(folder / name)
    if name != "manifest.json" and (folder / name).is_file() and not (folder / name).is_symlink():
        reseal(folder)
    assert in_child(lambda: in_bounds(lambda: every_command(tmp_path))) == 0, capfd.readouterr()
    assert WITNESS not in os.environ


@pytest.mark.parametrize("metric", ["0.5", [1], {"a": 1}, {"$float": "nan"}, True, 10**400], ids=str)
def test_the_commands_on_a_metric_that_is_none(
    metric: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    reseal(tmp_path / "checkpoint-1", lambda body: body["meta"].update({"metric": metric}))
    assert in_child(lambda: in_bounds(lambda: every_command(tmp_path))) == 0
    capfd.readouterr()
    assert main(["checkpoint", "ls", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert row["metric"] is None


def test_a_pickle_of_weights_becomes_safetensors(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "out.safetensors")]) == 0
    with open_tensors(tmp_path / "out.safetensors", Files()) as file:
        assert sorted(file.names) == ["a", "b"]
        assert torch.equal(file.read("a"), torch.ones(2))


def test_a_pickle_of_weights_with_code_becomes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_file_with_code(tmp_path / "pytorch_model.bin")
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "out.safetensors")]) == 2
    said = capsys.readouterr().err
    assert "pytorch_model.bin cannot be read" in said
    assert "putenv" in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out.safetensors").exists()
