from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.cli.launching.test_local import SCRIPT
from tests.dist.launch import end_of

from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.cli.launching.ray import run, show
from windlass.core.errors import ConfigError


def test_the_job_can_be_shown() -> None:
    plan = LaunchPlan("train.py", processes=4, engine="ray", max_restarts=2, engine_options={"name": "first"})
    job = json.loads(show(plan))
    assert job["scaling"] == {"num_workers": 4, "use_gpu": True, "resources_per_worker": {"CPU": 1}}
    assert (job["run"]["name"], job["max_failures"]) == ("first", 2)
    assert job["command"][-1] == "train.py"
    plan = replace(plan, engine_options={"resources_per_worker": '{"CPU": 2}'})  # as a flag gives it
    assert json.loads(show(plan))["scaling"]["resources_per_worker"] == {"CPU": 2}


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine_options\.adress='x'"):
        show(LaunchPlan("train.py", engine="ray", engine_options={"adress": "x"}))
    with pytest.raises(ConfigError, match=r"engine_options\.resources_per_worker='CPU:2'"):
        show(LaunchPlan("train.py", engine="ray", engine_options={"resources_per_worker": "CPU:2"}))


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
@pytest.mark.parametrize("address", ["nowhere", "auto"])
def test_a_cluster_that_is_not_there_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which Ray sets
    with pytest.raises(
        ConfigError, match=rf"engine_options\.address='{address}': no cluster of Ray is there"
    ):
        run(LaunchPlan(str(SCRIPT), engine="ray", cpu=True, engine_options={"address": address}))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_a_job_runs_on_ray_and_its_failure_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # Each process sees the GPUs of both, which need not exist.
    script.write_text(
        "import os, runpy\n"
        "seen, os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['CUDA_VISIBLE_DEVICES'], ''\n"
        "assert seen == '0,1', seen\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    words = ("launch", "--num_processes", 2, "--engine", "ray", script, "raises")
    # Ray's sockets lie below it, and the path of a socket has at most 107 bytes.
    with TemporaryDirectory(prefix="ray") as folder:
        gpus = {"CUDA_VISIBLE_DEVICES": "0,1", "RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'}
        environ = {"WINDLASS_HOME": "/nowhere", "TMPDIR": folder, **gpus}
        code, said = end_of("windlass", *words, timeout=1200, environ=environ)
        left = list(Path(folder).glob("windlass-*"))
    assert code == 1, said
    report = said.split("windlass launch:")[-1]
    assert "the job failed: rank 1 raised ValueError: row 17 is damaged [step 2, in 'data']" in report
    assert left == []
