"""What is launched, and what stops it before a process starts."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from tests.dist.launch import run_script

from windlass.cli.launching.launch import launch_settings, resolve_launch
from windlass.cli.launching.launch_checks import Machine
from windlass.cli.launching.launch_flags import add_launch_flags
from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.config.parallel.parallel_plan import plan_parallel
from windlass.config.parallel.sources import from_environment
from windlass.core.errors import ConfigError
from windlass.core.world import World
from windlass.recipes.from_files import default_file, find_file

TWO_DEVICES = Machine(2, "cuda")
OLD_DEVICES = Machine(
    2, "cuda", lambda precision, cpu: "has no bfloat16" if precision == "bf16" and not cpu else None
)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_launch_flags(parser)
    return parser.parse_args(list(words))


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


def resolved(
    *words: str, home: Path | None = None, machine: Machine | None = None, **environ: str
) -> LaunchPlan:
    environ = {"WINDLASS_HOME": str(home or "/nowhere"), "HF_HOME": "/nowhere", **environ}
    return resolve_launch(options(*words), environ, machine)


def complaints(*words: str, machine: Machine | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as error:
        resolved(*words, machine=machine, **environ)
    return str(error.value)


def test_flags_become_the_plan(script: str) -> None:
    plan = resolved(
        "--num_processes", "4", "--num_machines", "2",
        "--main_process_port", "29400", "--rdzv_backend", "c10d", "--rdzv_conf", "join_timeout=30,id=job",
        "--max_restarts", "3", "--monitor_interval", "0.5", "--log_dir", "logs", "--tee", "3",
        "--num_cpu_threads_per_process", "2", "--engine", "slurm",
        "--engine_options", "partition=long", "--stall_timeout", "60", "--machine_timeout", "20", "--role", "worker",
        "--preemption-grace", "30", "--requeue", "--max_requeues", "5",
        "--cpu", "--enable_cpu_affinity", "--environment", "A=1,2", script, "--lr", "1e-3",
    )  # fmt: skip
    assert plan.environment.keys() == {"A", "WINDLASS_PARALLEL"}
    assert plan.environment["A"] == "1,2"
    assert len(plan.settings) == 21
    shown = {
        name: getattr(plan, name) for name in LaunchPlan.__slots__ if name not in ("environment", "settings")
    }
    assert shown == {
        "script": script, "arguments": ("--lr", "1e-3"), "module": False, "no_python": False, "processes": 4,
        "machines": 2, "machine_rank": 0, "main_address": None, "main_port": 29400, "rendezvous": "c10d",
        "rendezvous_options": {"join_timeout": "30", "id": "job"}, "token_file": None,
        "max_restarts": 3, "monitor_interval": 0.5,
        "log_dir": "logs", "tee": "3", "threads": 2, "bind_cores": True, "role": "worker", "devices": "",
        "engine": "slurm", "engine_options": {"partition": "long"}, "cpu": True, "stall_timeout": 60.0,
        "machine_timeout": 20.0, "grace": 30, "requeue": True, "max_requeues": 5,
    }  # fmt: skip


def test_the_processes_find_the_settings_in_their_environment(script: str) -> None:
    plan = resolved("--use_fsdp", "--mixed_precision", "bf16", "--num_processes", "2", "--cpu", script)
    assert set(json.loads(plan.environment["WINDLASS_PARALLEL"])) == {"strategy", "precision", "cpu"}
    parallel = plan_parallel(from_environment(plan.environment), World(0, 2, 0, 2))
    assert (parallel.dist.strategy, parallel.precision.compute, parallel.use_cpu) == ("fsdp", "bf16", True)


def test_without_a_word_there_is_a_process_for_each_device(script: str) -> None:
    assert resolved(script).processes == 1
    assert resolved(script, machine=TWO_DEVICES).processes == 2
    assert resolved("--cpu", script, machine=TWO_DEVICES).processes == 1
    for written in ("0,1,", " 0, 1"):
        plan = resolved("--gpu_ids", written, script, machine=TWO_DEVICES)
        assert (plan.processes, plan.devices) == (2, "0,1")
        assert plan.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    plan = resolved("--gpu_ids", "1", script, machine=TWO_DEVICES)
    assert (plan.processes, plan.environment["CUDA_VISIBLE_DEVICES"]) == (1, "1")


def test_flags_over_environment_over_the_file(script: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("mixed_precision: fp16\nnum_processes: 2\nuse_cpu: true\n")
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    settings = launch_settings(options("--config_file", str(file), "--num_processes", "3", script), environ)
    assert settings["launch.processes"].value == 3
    assert settings["precision"].origin == "ACCELERATE_MIXED_PRECISION"
    assert [old.origin for old in settings["precision"].overridden] == [f"mixed_precision in {file}"]


def test_the_file_of_the_cache_folder_is_read_and_that_of_accelerate_named(
    script: str, tmp_path: Path
) -> None:
    theirs = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("num_processes: 2\nuse_cpu: true\ndistributed_type: MULTI_CPU\n")
    environ = {"WINDLASS_HOME": str(tmp_path / "own"), "HF_HOME": str(tmp_path / "hf")}
    settings = launch_settings(options(script), environ)
    assert settings["launch.processes"].value == 2
    assert str(theirs) in settings.notes[0]
    own = default_file(environ)
    own.parent.mkdir()
    own.write_text("num_processes: 3\nuse_cpu: true\n")
    assert find_file(environ) == (own, "")
    assert launch_settings(options(script), environ)["launch.processes"].value == 3


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("mixed_precision: fp9\nnum_machines: two\ndistributed_type: MEGATRON_LM\n")
    said = complaints(
        "--config_file", str(file), "--num_processes", "-1", "--machine_rank", "4", "--engine", "kubernetes",
        "--tee", "9", "--zero_stage", "4", str(tmp_path / "absent.py"),
    )  # fmt: skip
    for words in (
        "mixed_precision in", "num_machines in", "distributed_type in", "--num_processes=-1", "--machine_rank=4",
        "--engine='kubernetes': must be one of local, slurm, ray", "--tee='9'", "--zero_stage", "absent.py",
    ):  # fmt: skip
        assert words in said
    assert "9 problems" in said


@pytest.mark.parametrize(("words", "expected"), [
    (["--num_processes", "3"], "this machine, which has 2 device(s)"),
    (["--gpu_ids", "0,5"], "--gpu_ids='0,5': names 5"),
    (["--tee", "0:3,2:1"], "--tee='0:3,2:1': names a rank that this machine does not have: 0..1"),
    (["--gpu_ids", "0, 5"], "--gpu_ids='0, 5': names 5"),
    (["--gpu_ids", "1,1"], "--gpu_ids='1,1': names a device twice"),
    (["--mixed_precision", "bf16"], "--mixed_precision='bf16': has no bfloat16"),
    (["--num_processes", "3", "--num_machines", "2", "--main_process_ip", "h", "--main_process_port", "0"],
     "cannot share it equally"),
    (["--num_machines", "2"], "--main_process_ip=None: is needed"),
    (["--num_machines", "2"], "--main_process_port=None: is needed"),
    (["--multi_gpu", "--use_fsdp"], "leave one of the two out"),
    (["--fsdp_offload_params", "true"], "sharding is off"),
    (["--fp8_backend", "te"], "--fp8_backend='te'"),
    (["--megatron_lm_tp_degree", "2"], "--megatron_lm_tp_degree='2'"),
    (["--tpu"], "--tpu=True"),
    (["--nproc_per_node", "2"], "--nproc_per_node='2': is torchrun's: give --num_processes"),
    (["--mpirun_hostfile", "hosts"], "--mpirun_hostfile='hosts'"),
])  # fmt: skip
def test_what_cannot_be_launched(words: list[str], expected: str, script: str) -> None:
    assert expected in complaints(*words, script, machine=OLD_DEVICES)


def test_a_machine_without_devices_has_none_of_any_name(script: str) -> None:
    assert "--gpu_ids='GPU-3f': names GPU-3f" in complaints("--gpu_ids", "GPU-3f", script)


@pytest.mark.parametrize(("words", "expected"), [
    (["absent.py"], "is not a file in"), (["-m", "no_such_package_x.y"], "not a module"),
    (["--no_python", "no-such-program-x"], "not a program"), (["-m", "--no_python", "json"], "contradicts --module"),
])  # fmt: skip
def test_scripts_that_are_none(words: list[str], expected: str) -> None:
    assert expected in complaints(*words)


def test_the_launcher_itself_is_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as that of a console script
    assert "not a module" in complaints("-m", "__main__")


def test_a_recipe_is_no_script(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.touch()
    assert f"windlass launch -m windlass train {recipe}" in complaints(str(recipe))


def test_modules_and_programs_are_found() -> None:
    assert resolved("-m", "json.tool").module
    assert resolved("--no_python", "true").no_python


def two_machines_over(port: str) -> list[str]:
    """Flags of the main one of two machines that meet at this port."""
    machines = ["--num_machines", "2", "--num_processes", "2"]
    return [*machines, "--main_process_ip", "127.0.0.1", "--main_process_port", port]


def test_a_port_in_use_is_named_and_only_on_the_machine_that_listens(script: str) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--main_process_port={port}: is in use" in complaints("--main_process_port", port, script)
        two = two_machines_over(port)
        assert "is in use" in complaints(*two, script)
        second = resolved(*two, "--machine_rank", "1", script)
        assert (second.machine_rank, second.main_address) == (1, "127.0.0.1")
        # Without ranks it may be the other machine that listens there.
        assert resolved(*two, "--rdzv_backend", "c10d", script).rendezvous == "c10d"
    assert resolved("--main_process_port", "0", script).main_port == 0


def test_a_clusters_machines_are_not_this_one(script: str) -> None:
    words = ["--engine", "slurm", "--num_processes", "64", "--num_machines", "8", "--mixed_precision", "bf16"]
    assert resolved(*words, script, machine=OLD_DEVICES).processes == 64


@pytest.mark.parametrize(("engine", "words"), [
    ("ray", ["--requeue"]), ("ray", ["--preemption_grace", "9"]),
    ("ray", ["--stall_timeout", "60"]), ("ray", ["--log_dir", "logs"]), ("ray", ["--tee", "3"]),
    ("ray", ["--num_machines", "2"]), ("ray", ["--main_process_port", "29400"]), ("ray", ["--gpu_ids", "0,1"]),
    ("slurm", ["--main_process_ip", "10.0.0.1"]), ("local", ["--engine_options", "partition=long"]),
])  # fmt: skip
def test_what_an_engine_settles_itself_is_refused_by_name(engine: str, words: list[str], script: str) -> None:
    said = complaints("--engine", engine, "--num_processes", "2", *words, script)
    assert f"{words[0]}=" in said
    assert f"cannot be had with the {engine} engine" in said


def over(address: str) -> list[str]:
    words = f"--num_machines 2 --num_processes 2 --machine_rank 1 --main_process_ip {address}"
    return [*words.split(), "--main_process_port", "9"]


def test_a_job_that_other_machines_reach_starts_without_a_token_and_says_so_once(
    script: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = {"WINDLASS_RDZV_TOKEN": "x" * 16}
    for address, environ in (("10.0.0.2", secret), ("127.0.0.1", {}), ("localhost", {})):
        assert resolved(*over(address), script, **environ).machines == 2
    assert not caplog.messages
    for _ in range(2):
        resolved(*over("10.0.0.2"), script)
    assert len(caplog.messages) == 1
    for word in ("any machine that reaches 10.0.0.2", "WINDLASS_RDZV_TOKEN", "--rdzv_token_file"):
        assert word in caplog.text


def test_a_token_is_a_secret_that_can_be_read(script: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    flags = [*over("10.0.0.1"), "--rdzv_token_file", str(file)]
    assert f"--rdzv_token_file={str(file)!r}: cannot be read" in complaints(*flags, script)
    file.write_text("short\n")
    assert "must have at least 16 characters" in complaints(*flags, script)
    file.write_text("y" * 32)
    assert resolved(*flags, script).token_file == str(file)


@pytest.mark.skipif(os.name != "posix", reason="permissions of a POSIX system")
def test_a_token_file_that_others_can_read_is_reported_with_the_command_that_closes_it(
    script: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for mode, warned in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        caplog.clear()
        file = tmp_path / f"the token {mode:o}"
        file.write_text("y" * 32)
        file.chmod(mode)
        resolved(*over("10.0.0.1"), "--rdzv_token_file", str(file), script)
        assert [f"(mode {mode:o}): chmod 600 '{file}'" in said for said in caplog.messages] == [True] * warned


def test_starting_a_job_again_needs_a_queue_or_one_machine(script: str, tmp_path: Path) -> None:
    assert "--max_requeues=2: limits --requeue" in complaints("--max_requeues", "2", script)
    two = two_machines_over("29400")
    assert "--requeue=True: needs Slurm for several machines" in complaints(*two, "--requeue", script)
    assert resolved(*two, "--machine_rank", "1", "--requeue", script, SLURM_JOB_ID="4711").requeue
    file = tmp_path / "my.yaml"
    file.write_text("requeue: true\npreemption_grace: 60\n")
    plan = resolved("--config_file", str(file), script)
    assert (plan.requeue, plan.grace, plan.max_requeues) == (True, 60, None)
    assert "must be at least 1" in complaints("--preemption_grace", "0", script)


@pytest.mark.parametrize("words", [
    ["--stall_timeout", "0"], ["--stall_timeout", "-5"], ["--stall_timeout", "nan"], ["--monitor_interval", "0"],
])  # fmt: skip
def test_times_are_longer_than_nothing(words: list[str], script: str) -> None:
    assert f"{words[0]}={words[1]!r}: must be a number of seconds above 0" in complaints(*words, script)


def test_a_wrong_launch_ends_before_torch_is_asked_to_start_anything(tmp_path: Path) -> None:
    words = [
        "launch",
        "--cpu",
        "--num_processes",
        "2",
        "--engine",
        "x",
        "--mixed_precision",
        "fp9",
        "absent.py",
    ]
    said = run_script("windlass", *words, cwd=tmp_path, expect=2)
    assert said.count("\n  - ") == 3
    assert "Traceback" not in said


def test_accelerators_that_are_not_there_are_not_replaced_in_silence(script: str) -> None:
    assert "--multi_gpu=True: requests accelerators" in complaints(
        "--multi_gpu", "--num_processes", "4", script
    )


def test_flags_of_the_launch_after_the_script_are_named(
    script: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = resolved(script, "--lr", "1", "--num-processes=2")
    assert plan.arguments == ("--lr", "1", "--num-processes=2")
    (note,) = [record.getMessage() for record in caplog.records]
    assert (
        note == f"--num-processes is after {script}, which gets it; a flag of the launch is before the script"
    )
