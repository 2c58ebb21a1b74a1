"""Seconds that each file of tests takes, recorded and held to a budget: `make test ARGS=--record-durations`.

A pytest plugin. Setup, call and teardown of all tests count, on however many processes they run.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("durations.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {FILE.name} after a whole run")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--record-durations") or hasattr(config, "workerinput"):
        return
    seconds: dict[str, float] = defaultdict(float)
    tests: set[str] = set()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
                tests.add(report.nodeid)
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "tests": len(tests),
        "total": round(sum(seconds.values())),
        "files": {
            name: round(spent, 1) for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
        },
    }
    FILE.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    terminalreporter.write_line(f"{record['total']} s in {len(seconds)} files, written to {FILE}")
