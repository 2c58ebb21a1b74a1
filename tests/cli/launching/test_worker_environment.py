"""Variables of processes that another engine than the local one places."""

from __future__ import annotations

import os

import pytest

from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.cli.launching.worker_environment import worker_environment
from windlass.core.threads import usable_cores
from windlass.dist.listening import GLOO_VARIABLE, loopback_interface


def test_processes_of_several_machines_do_not_listen_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {GLOO_VARIABLE, "OMP_NUM_THREADS"} & os.environ.keys():
        monkeypatch.delenv(name)
    plan = LaunchPlan("train.py", processes=64, engine="ray")
    here, among_others = worker_environment(plan), worker_environment(plan, 2, "192.0.2.1")
    assert here[GLOO_VARIABLE] == loopback_interface()
    assert among_others.get(GLOO_VARIABLE) != loopback_interface()
    assert among_others["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))
