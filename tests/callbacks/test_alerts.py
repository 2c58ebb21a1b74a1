from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, read_metrics
from windlass.callbacks.alerts import WEBHOOK_VARIABLE, Alerts, Webhook, read_rules
from windlass.callbacks.run_view import read_run
from windlass.core.errors import ConfigError


def row(step: int, loss: Any = 1.0, **timing: Any) -> dict[str, Any]:
    return {"event": "log", "step": step, "epoch": 1.0, "loss": loss, "timing": {"wall": 0.0, **timing}}


def rules_of(alerts: Alerts, *reports: dict[str, Any]) -> list[tuple[int, str]]:
    return [(alert["step"], alert["alert"]) for report in reports for alert in alerts.check(report)]


def test_a_rule_alerts_when_it_begins_to_hold() -> None:
    alerts = Alerts({"loss_rise": 0.5})
    losses = [2.0, 1.0, 1.4, 1.6, 1.7, 1.0, "NaN"]
    reports = [row(step, loss) for step, loss in enumerate(losses, start=1)]
    assert rules_of(alerts, *reports) == [(4, "loss_rise"), (7, "loss_rise")]


def test_shares_and_checkpoints() -> None:
    now = [0.0]
    alerts = Alerts({"data_wait": 0.3, "slow_rank": 0.2, "no_checkpoint": 60}, clock=lambda: now[0])
    assert rules_of(alerts, row(1, data_wait=0.3), row(2, data_wait=0.31)) == [(2, "data_wait")]
    assert rules_of(alerts, row(3, slowest_rank=2, slowest_rank_wait=0.5)) == [(3, "slow_rank")]
    now[0] = 61.0
    assert rules_of(alerts, row(4)) == [(4, "no_checkpoint")]
    alerts.saved()
    assert rules_of(alerts, row(5)) == []
    now[0] = 130.0
    assert rules_of(alerts, row(6)) == [(6, "no_checkpoint")]


def test_a_report_that_does_not_measure_a_rule_changes_nothing() -> None:
    """A script logs rows of its own, also under these names."""
    rules = {"loss_rise": 0.5, "data_wait": 0.3, "slow_rank": 0.3}
    high = row(2, 2.0, data_wait=0.5, slowest_rank=1, slowest_rank_wait=0.5)
    others: list[Any] = ["NaN", "Infinity", "much", True, [0.5]]
    own = [row(step, None, data_wait=one, slowest_rank_wait=one) for step, one in enumerate(others, start=3)]
    found = rules_of(Alerts(rules), row(1, 1.0), high, *own, {**high, "step": 9})
    assert found == [(2, "loss_rise"), (2, "data_wait"), (2, "slow_rank")]


def test_a_script_may_log_what_is_not_a_number(tmp_path: Path) -> None:
    trainer = Trainer(
        Net(), arguments(tmp_path, max_steps=1, alerts={"data_wait": 0.9}), train_dataset=rows(8)
    )
    trainer.train()
    trainer.log({"data_wait": float("nan"), "slowest_rank_wait": float("nan")})
    (logged,) = (one for one in read_metrics(tmp_path / "metrics.jsonl") if "data_wait" in one["timing"])
    assert math.isnan(logged["timing"]["data_wait"])


@pytest.mark.parametrize("value", [{"loss": 1}, {"data_wait": "much"}, {"data_wait": 0}, {"slow_rank": True}])
def test_what_is_not_a_rule_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="alerts"):
        read_rules(value)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.SimpleQueue[dict[str, Any]]]:
    """What was posted to the address of the environment."""
    arrived: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arrived.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            """Nothing is printed."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv(WEBHOOK_VARIABLE, f"http://127.0.0.1:{server.server_port}/secret")
    yield arrived
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_writes_and_posts_its_alerts(
    tmp_path: Path, received: queue.SimpleQueue[dict[str, Any]]
) -> None:
    args = arguments(tmp_path, max_steps=4, logging_steps=1, alerts={"no_checkpoint": 1e-9})
    Trainer(Net(), args, train_dataset=rows(64)).train()
    assert received.get(timeout=30)["text"].startswith("no_checkpoint at step 1: no checkpoint for")
    written = [found for found in read_metrics(tmp_path / "metrics.jsonl") if found["event"] == "alert"]
    assert [found["step"] for found in written] == [1], "it goes on to hold"
    assert [event.kind for event in read_run(tmp_path).events] == ["alert"]
    assert "secret" not in "".join(path.read_text() for path in tmp_path.glob("*.json*"))


class LossOfStep(Trainer):
    """The loss of each update is set, and has no gradient but 0."""

    losses = (2.0, 1.0, 1.0, 1.6, 1.7, 1.0, 1.6, 1.0)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs)["loss"] * 0.0 + self.losses[self.state.global_step]


def alerts_of(folder: Path) -> list[tuple[int, str]]:
    return [
        (found["step"], found["message"])
        for found in read_metrics(folder / "metrics.jsonl")
        if "alert" in found
    ]


@pytest.mark.parametrize("stop", [2, 3, 4, 5, 6])
def test_a_resumed_run_alerts_as_an_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    """The lowest loss was reported before, and so was what still holds."""
    options = {"logging_strategy": "steps", "logging_steps": 1, "save_strategy": "steps", "save_steps": 1}
    for steps in (stop, 8):
        args = arguments(tmp_path, max_steps=steps, alerts={"loss_rise": 0.5}, **options)
        LossOfStep(Net(), args, train_dataset=rows(64)).train(resume_from_checkpoint=steps == 8)
    rise = "the loss is 1.6, and was 1"
    assert alerts_of(tmp_path) == [(4, rise), (7, rise)]


def test_a_second_run_of_a_trainer_is_not_compared_with_the_first(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, max_steps=3, logging_strategy="steps", logging_steps=1, alerts={"loss_rise": 0.5}
    )
    trainer = LossOfStep(Net(), args, train_dataset=rows(64))
    trainer.train()
    trainer.train()
    assert alerts_of(tmp_path) == []


LAST_WORDS = """
from windlass.callbacks.alerts import Alerts
alerts = Alerts({"loss_rise": 0.5, "data_wait": 0.5})
alerts.check({"event": "log", "step": 1, "loss": "NaN", "timing": {"data_wait": 0.9}})
raise SystemExit("the loss is not finite")
"""


def test_the_alerts_of_an_error_are_sent_before_the_process_ends(
    received: queue.SimpleQueue[dict[str, Any]],
) -> None:
    ended = subprocess.run([sys.executable, "-c", LAST_WORDS], capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert [received.get(timeout=30)["alert"] for _ in range(2)] == ["loss_rise", "data_wait"]


def test_the_thread_that_posts_ends_with_the_last_alert(received: queue.SimpleQueue[dict[str, Any]]) -> None:
    """A process that makes many runs, as a search does, would have one more with each."""
    webhook = Webhook(os.environ[WEBHOOK_VARIABLE])
    for step in (1, 2):
        webhook.send({"alert": "loss_rise", "step": step, "message": "the loss is NaN"})
        assert received.get(timeout=30)["step"] == step
        for thread in threading.enumerate():
            if thread.name == "windlass-alerts":
                thread.join(10)
                assert not thread.is_alive()


def test_an_address_that_does_not_answer_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, "http://127.0.0.1:9/")
    args = arguments(tmp_path, max_steps=2, logging_steps=1, alerts='{"no_checkpoint": 1e-9}')
    assert Trainer(Net(), args, train_dataset=rows(64)).train().global_step == 2
