"""Every built-in tracker without a network: how to run it, and how to read back what it kept."""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# {metric: {step: value}}
Curves = dict[str, dict[int, float]]


def offline(folder: Path) -> dict[str, str]:
    """Environment in which no tracker asks the network, and all of them write below `folder`."""
    return {
        "HOME": str(folder / "home"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "SWANLAB_MODE": "offline",
        "DVC_NO_ANALYTICS": "1",
        "NEPTUNE_MODE": "offline",
        "NEPTUNE_PROJECT": "someone/tests",
    }


def tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Curves = {}
    for run in {path.parent for path in folder.rglob("events.out.tfevents*")}:
        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({e.step: e.value for e in events.Scalars(tag)})
    return found


def wandb(folder: Path) -> Curves:
    from wandb.proto.wandb_internal_pb2 import Record

    found: Curves = {}
    for path in sorted(folder.rglob("run-*.wandb")):
        for data in _log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            step = items.get("_step", record.history.step.num)
            _add(found, items, items.get("train/global_step", step))
    return found


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind the seven bytes that name it.

    Source: LevelDB, doc/log_format.md: blocks of 32 KiB, each record with checksum (4 bytes), length (2) and type (1:
    whole, 2: first, 3: middle, 4: last part).
    """
    block, place, parts = 32 * 1024, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<4xHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def mlflow(folder: Path) -> Curves:
    found: Curves = {}
    for path in filter(Path.is_file, folder.glob("mlruns/*/*/metrics/**/*")):
        rows = [line.split() for line in path.read_text().splitlines()]
        name = path.as_posix().partition("/metrics/")[2]
        found[name] = {int(step): float(value) for _, value, step in rows}
    return found


def trackio(folder: Path) -> Curves:
    import sqlite3

    found: Curves = {}
    for path in folder.glob("trackio/*.db"):
        with sqlite3.connect(path) as database:
            for step, metrics in database.execute("SELECT step, metrics FROM metrics"):
                _add(found, json.loads(metrics), step)
    return found


def dvclive(folder: Path) -> Curves:
    found: Curves = {}
    for path in folder.rglob("dvclive/plots/metrics/**/*.tsv"):
        head, *rows = [line.split("\t") for line in path.read_text().splitlines()]
        name = (
            path.relative_to(next(p for p in path.parents if p.name == "metrics")).with_suffix("").as_posix()
        )
        found[name] = {int(row[head.index("step")]): float(row[head.index(head[-1])]) for row in rows}
    return found


def aim(folder: Path) -> Curves:
    from aim import Repo, Run

    found: Curves = {}
    for path in folder.rglob(".aim"):
        for name in Repo(str(path.parent)).list_all_runs():
            # Opened as if to go on: what is not yet indexed is hidden from readers.
            quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
            run = Run(name, repo=str(path.parent), **quiet)
            for metric in run.metrics():
                points = metric.dataframe()
                found.setdefault(metric.name, {}).update(zip(points["step"], points["value"], strict=True))
            run.close()
    return found


def swanlab(folder: Path) -> Curves:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: Curves = {}
    for path in folder.rglob("run-*.swanlab"):
        reader = DataStoreReader()
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                _add(found, {record.scalar.key: record.scalar.value.number}, record.scalar.step)
    return found


def clearml(folder: Path) -> Curves:
    found: Curves = {}
    for path in folder.rglob("metrics.jsonl"):
        if "offline-" not in path.parent.name:
            continue
        for line in path.read_text().splitlines():
            for event in json.loads(line):
                if event.get("type") == "training_stats_scalar":
                    chart, curve = event["metric"], event["variant"]
                    name = chart if chart == curve else f"{curve}_{chart}"
                    found.setdefault(name, {})[event["iter"]] = event["value"]
    return found


def comet_ml(folder: Path) -> Curves:
    found: Curves = {}
    for path in folder.glob("comet/*.zip"):
        with zipfile.ZipFile(path) as archive:
            lines = archive.read("messages.json").decode().splitlines()
        for message in map(json.loads, lines):
            metric = message.get("payload", {}).get("metric")
            if message.get("type") == "metric_msg" and metric is not None:
                found.setdefault(metric["metricName"], {})[metric["step"]] = float(metric["metricValue"])
    return found


def neptune(folder: Path) -> Curves:
    found: Curves = {}
    for path in folder.rglob("data-*.log"):
        for line in path.read_text().splitlines():
            done = json.loads(line)["obj"]
            if done["type"] == "LogFloats" and done["path"][0] != "monitoring":
                for one in done["values"]:
                    found.setdefault("/".join(done["path"]), {})[int(one["step"])] = one["value"]
    return found


def _add(found: Curves, values: dict[str, Any], step: int) -> None:
    for name, value in values.items():
        value = math.nan if value == "NaN" else value
        if isinstance(value, int | float) and not name.startswith("_"):
            found.setdefault(name, {})[step] = value


READERS: dict[str, Callable[[Path], Curves]] = {
    "aim": aim,
    "azure_ml": mlflow,
    "clearml": clearml,
    "comet_ml": comet_ml,
    "dagshub": mlflow,
    "dvclive": dvclive,
    "mlflow": mlflow,
    "neptune": neptune,
    "swanlab": swanlab,
    "tensorboard": tensorboard,
    "trackio": trackio,
    "wandb": wandb,
}
# What a tracker needs, if that is not the package of its name alone.
PACKAGES = {"azure_ml": "azureml"}


def each_installed() -> Iterator[Any]:
    """Names of all trackers as test cases; one whose package is not installed is skipped by name."""
    from windlass.core.optional import is_available

    for name in READERS:
        package = PACKAGES.get(name, name)
        missing = pytest.mark.skipif(not is_available(package), reason=f"{package} is not installed")
        yield pytest.param(name, marks=missing)
