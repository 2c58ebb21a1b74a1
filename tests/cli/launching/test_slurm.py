from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.launching.test_local import SCRIPT, windlass

from windlass.cli.launching.launch_plan import LaunchPlan, from_text, to_text
from windlass.cli.launching.slurm import plan_of_node, run, show
from windlass.core.errors import ConfigError

pytest.importorskip("submitit")
PLAN = LaunchPlan(
    "train.py",
    ("--lr", "3"),
    processes=16,
    machines=2,
    engine="slurm",
    engine_options={"partition": "long", "account": "physics", "mem_gb": "64", "time": 90},
    environment={"WINDLASS_PARALLEL": "{}"},
)


def test_the_batch_file_asks_for_what_the_plan_needs(tmp_path: Path) -> None:
    text = show(PLAN)
    for line in (
        "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=long", "--account=physics", "--mem=64GB",
        "--time=90", "--job-name=train",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, None),
        ({"time": None}, None),
        ({"timeout_min": None}, None),
        ({"time": 90}, "90"),
        ({"timeout_min": 7}, "7"),
        ({"timeout_min": "7", "cpus_per_task": "2"}, "7"),  # as flags give them
    ],
)
def test_a_job_has_no_time_limit_but_the_one_that_was_given(
    options: dict[str, int], limit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the batch file that is shown nor in the one that Slurm gets."""
    for name, text in (("srun", ""), ("sbatch", f'cp "$1" {tmp_path}/batch; echo Submitted batch job 7')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plan = replace(PLAN, machines=1, engine_options={**options, "folder": str(tmp_path / "jobs")})
    assert run(plan) == 0
    for text in (show(plan), (tmp_path / "batch").read_text()):
        assert re.findall(r"--time=(\S+)", text) == ([] if limit is None else [limit])
        assert " -P -u -m submitit.core._submit " in text, "modules of the current folder are not imported"


def test_slurm_tells_before_it_takes_the_machines_of_a_job_that_starts_again() -> None:
    given = {"setup": "module load cuda", "additional_parameters": {"qos": "low"}}
    text = show(replace(PLAN, requeue=True, grace=90, engine_options=given))
    for line in ("#SBATCH --signal=USR1@90", "#SBATCH --requeue", "#SBATCH --qos=low", "module load cuda",
                 "export SUBMITIT_PREEMPT_SIGNAL=USR1"):  # fmt: skip
        assert f"\n{line}\n" in text
    assert "USR1" not in show(PLAN)
    there = plan_of_node(replace(PLAN, requeue=True, max_requeues=3), 0, ["n17"], job=1)
    assert (there.requeue, there.max_requeues) == (True, 3)


def test_options_that_slurm_does_not_have_are_refused_together() -> None:
    plan = LaunchPlan(
        "train.py", engine="slurm", engine_options={"partitio": "long", "cluster": "moon", "wait": "perhaps"}
    )
    with pytest.raises(ConfigError) as caught:
        show(plan)
    assert "did you mean 'partition'?" in str(caught.value)
    assert "engine_options.cluster='moon'" in str(caught.value)
    assert "engine_options.wait='perhaps': must be True or False" in str(caught.value)


def test_what_slurm_says_of_a_job_that_it_does_not_take_is_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("srun", ""), ("sbatch", "echo sbatch: error: invalid partition >&2; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plan = replace(PLAN, machines=1)
    said = "Slurm did not take the job: sbatch: error: invalid partition"
    with pytest.raises(ConfigError, match=said):
        run(replace(plan, engine_options={"partition": "long", "folder": str(tmp_path / "jobs")}))
    (tmp_path / "file").write_text("")
    for machines in (1, 2):  # of several, the folder has their secret, too
        with pytest.raises(ConfigError, match=r"engine_options\.folder=.* cannot hold the files of the job"):
            run(replace(PLAN, machines=machines, engine_options={"folder": str(tmp_path / "file" / "jobs")}))


def test_this_machine_alone_stands_for_no_cluster_of_several() -> None:
    with pytest.raises(ConfigError, match="runs the job on this machine alone: leave --num_machines out"):
        run(replace(PLAN, engine_options={"cluster": "local"}))


def test_a_machine_without_slurm_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs srun on PATH: start it on a login node"):
        run(replace(PLAN, engine_options={"folder": str(tmp_path / "jobs")}))
    assert not list(tmp_path.iterdir())


def test_a_plan_survives_its_way_to_the_machines() -> None:
    assert from_text(to_text(PLAN)) == PLAN


def test_each_machine_knows_its_rank_and_the_main_one() -> None:
    there = plan_of_node(from_text(to_text(PLAN)), 1, ["n17", "n18"], job=123456)
    assert (there.machine_rank, there.main_address, there.main_port) == (1, "n17", 23456)
    assert (there.engine, there.processes, there.environment) == ("local", 16, {"WINDLASS_PARALLEL": "{}"})


@pytest.mark.dist
def test_a_job_runs_through_submitit_and_its_failure_is_reported(tmp_path: Path) -> None:
    """Without a time limit, as Slurm's jobs may be."""
    settings = tmp_path / "settings.yaml"
    options = {"cluster": "local", "folder": str(tmp_path), "timeout_min": None}
    settings.write_text(json.dumps({"engine": "slurm", "engine_options": options}))
    code, said = windlass(
        "launch", "--cpu", "--num_processes", 2, "--config_file", settings, SCRIPT, "raises"
    )
    assert code == 1, said
    assert "the job failed: rank 1 raised ValueError: row 17 is damaged [step 2, in 'data']" in said
    assert json.loads(next(tmp_path.glob("*.code")).read_text()) == 1
