from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.dist.launch import run_script

from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.cli.launching.local import command
from windlass.cli.launching.worker import cores_of
from windlass.dist.beacon import FOLDER_VARIABLE, Lookout

WORKER = "windlass.cli.launching.worker"


@pytest.mark.parametrize(
    ("rank", "size", "cores", "expected"),
    [
        (0, 2, [0, 1, 2, 3], [0, 1]),
        (1, 2, [0, 1, 2, 3], [2, 3]),
        (1, 2, [4, 6, 9], [6]),
        (2, 3, [0, 1], [0, 1]),  # too few: no process is bound
        (0, 1, [0, 1], [0, 1]),
    ],
)
def test_cores_are_shared_out(rank: int, size: int, cores: list[int], expected: list[int]) -> None:
    assert cores_of(rank, size, cores) == expected


def variables(folder: Path) -> dict[str, str]:
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        FOLDER_VARIABLE: str(folder),
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    module, (script, *arguments) = words[0] == "-m", [word for word in words if word != "-m"]
    return subprocess.run(
        command(LaunchPlan(script, tuple(arguments), module=module)),
        env={**os.environ, **variables(folder), **environ},
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )


SAYS_WHO_IT_IS = """
import os, sys, json
import beside
print(json.dumps([__name__, sys.argv, os.path.basename(__file__), beside.HERE, "torch" in sys.modules]))
"""


def test_a_script_finds_itself_as_python_would_have_started_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(SAYS_WHO_IT_IS)
    (tmp_path / "sub" / "beside.py").write_text("HERE = 1")
    done = run(tmp_path, "sub/script.py", "--lr", "3")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["__main__", ["sub/script.py", "--lr", "3"], "script.py", 1, False]
    assert Lookout(tmp_path, 0).mark().call == "end"


def test_a_module_does_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAYS_WHO_IT_IS)
    (tmp_path / "beside.py").write_text("HERE = 1")
    done = run(tmp_path, "-m", "script", "a")
    assert done.returncode == 0, done.stderr
    name, arguments, *_ = json.loads(done.stdout)
    assert name == "__main__"
    assert arguments[1:] == ["a"]


@pytest.mark.parametrize("name", ["contextlib", "json", "queue", "runpy", "traceback"])
def test_nothing_of_the_current_folder_is_imported_before_the_script(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('the planted file ran')")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(f"import {name}\nprint('the script ran')")
    done = run(tmp_path, "sub/script.py")
    assert (done.returncode, done.stdout) == (0, "the script ran\n"), done.stderr


@pytest.mark.parametrize("words", [("sub/script.py",), ("link.py",), ("-m", "sub.script")])
@pytest.mark.parametrize("safe", ["", "1"])
def test_the_path_of_modules_is_the_one_that_python_gives_a_script(
    tmp_path: Path, words: tuple[str, ...], safe: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text("import sys\nprint(sys.path)")
    (tmp_path / "link.py").symlink_to("sub/script.py")
    # Without the current folder on the path a module is found by a path of its own.
    variables = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": safe}
    plain = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert run(tmp_path, *words, **variables).stdout == plain.stdout


FAILS = """
from windlass.dist.beacon import beacon
def deep():
    beacon().call("backward", 4)
    raise KeyError("weight")
deep()
"""


def test_an_exception_is_written_down_with_step_and_call(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS)
    done = run(tmp_path, "script.py")
    assert done.returncode == 1
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "KeyError: 'weight'"
    extra = message["extraInfo"]
    assert (extra["step"], extra["call"]) == (4, "backward")
    assert extra["py_callstack"] in done.stderr  # printed as well, once
    assert "runpy" not in done.stderr
    assert done.stderr.count("KeyError: 'weight'") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_in_a_command_is_printed_by_the_first_process_alone(tmp_path: Path, rank: int) -> None:
    done = run(tmp_path, "-m", "windlass", "train", "absent.yaml", RANK=str(rank), WORLD_SIZE="2")
    assert done.returncode == 2
    recorded = tmp_path / "error.json"
    assert ("absent.yaml" in done.stderr, recorded.exists()) == (rank == 0, rank == 1)
    assert rank == 0 or "absent.yaml" in json.loads(recorded.read_text())["message"]["message"]


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("7", 7), ("'no licence'", 1)])
def test_an_exit_of_the_scripts_own_is_its_own(tmp_path: Path, code: str, expected: int) -> None:
    (tmp_path / "script.py").write_text(f"import sys\nsys.exit({code})")
    assert run(tmp_path, "script.py").returncode == expected
    assert not (tmp_path / "error.json").exists()


LOOPS = """
import os, sys
import torch
from windlass.accelerator.accelerator import Accelerator
accelerator = Accelerator(cpu=True)
layer = torch.nn.Linear(2, 1)
data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
model, optimizer, loader = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1), data)
def stop_at(place, number):
    if sys.argv[1] == place and number == 2:
        os._exit(0)
for number, batch in enumerate(loader):
    stop_at("batch", number)
    accelerator.backward(model(batch).sum())
    stop_at("backward", number)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("place", "call"),
    [("batch", "after read data"), ("backward", "after backward"), ("nowhere", "end")],
)
def test_a_loop_of_ones_own_leaves_marks_too(tmp_path: Path, place: str, call: str) -> None:
    (tmp_path / "script.py").write_text(LOOPS)
    run_script(WORKER, "script.py", place, cwd=tmp_path, environ=variables(tmp_path))
    mark = Lookout(tmp_path, 0).mark()
    assert (mark.step, mark.call) == (4 if place == "nowhere" else 2, call)
