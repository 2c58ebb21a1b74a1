"""Alerts of a run: rules over what it logs. Each is a row of `metrics.jsonl`, a warning, and one POST if asked for."""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from windlass.callbacks.rows import Row, as_json, is_number
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.logs import get_logger

# The address that alerts are sent to. It often is a secret, so no argument has it, and no file of a run.
WEBHOOK_VARIABLE = "WINDLASS_ALERT_WEBHOOK"
# Each rule, and what its number is.
RULES = {
    "loss_rise": "share by which a loss is above the lowest one before",
    "data_wait": "share of the training time spent waiting for data",
    "no_checkpoint": "seconds since the last checkpoint",
    "slow_rank": "share of the training time that others wait for one rank",
}
_MOST_WAITING = 16  # alerts that wait to be sent; further ones are not sent
_TIMEOUT = 10.0  # seconds of one request
_LAST_SECONDS = 5.0  # that a process waits at its end for alerts to be sent

logger = get_logger(__name__)


def read_rules(value: Any) -> dict[str, float]:
    """Return the rules of the argument `alerts`. Raises ConfigError for an unknown rule or an invalid limit."""
    if value is None:
        return {}
    known = ", ".join(f"{name} ({what})" for name, what in RULES.items())
    if not isinstance(value, Mapping):
        raise ConfigError(Problem("alerts", value, f"must be a mapping of rules to limits: {known}"))
    refuse(
        Problem(f"alerts.{name}", limit, f"unknown rule; known: {known}")
        if name not in RULES
        else Problem(f"alerts.{name}", limit, f"must be a positive number: {RULES[name]}")
        for name, limit in value.items()
        if name not in RULES or not (is_number(limit) and 0 < limit < math.inf)
    )
    return {name: float(limit) for name, limit in value.items()}


class Alerts:
    """Checks each report of a run. A rule alerts when it begins to hold, and again only after it ceased to.

    Args:
        rules: limits by name.
        clock: returns seconds of a clock that is never set.
    """

    def __init__(self, rules: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._rules, self._clock = rules, clock
        address = os.environ.get(WEBHOOK_VARIABLE) if rules else None
        self._send = Webhook(address).send if address else None
        self._lowest = math.inf
        self._saved_at = clock()
        self._holding: set[str] = set()

    def saved(self) -> None:
        """Called when training begins, and after each checkpoint."""
        self._saved_at = self._clock()

    def begin(self, rows: Callable[[], Iterable[Row]]) -> None:
        """Called when a run begins, and after it rolled back. `rows` returns what was reported before: a resumed run
        alerts of what an uninterrupted one does, and not again of what still holds.
        """
        self._lowest, self._holding = math.inf, set()
        for row in rows() if self._rules else ():
            self._begun(as_json(row))

    def check(self, row: Row) -> list[Row]:
        """Return the rows of the alerts that this report gives; each is logged and sent."""
        return [self._alert(rule, message, row) for rule, message in self._begun(row)]

    def _begun(self, row: Row) -> list[tuple[str, str]]:
        """The rules that begin to hold with this report, each with its message."""
        if not self._rules or row.get("event") != "log":
            return []
        begun = []
        for rule, limit in self._rules.items():
            message = getattr(self, f"_{rule}")(row, limit)
            if message is None:
                continue
            if not message:
                self._holding.discard(rule)
            elif rule not in self._holding:
                self._holding.add(rule)
                begun.append((rule, message))
        loss = row.get("loss")
        if isinstance(loss, float) and math.isfinite(loss):
            self._lowest = min(self._lowest, loss)
        return begun

    def _alert(self, rule: str, message: str, row: Row) -> Row:
        logger.warning("alert %s at step %d: %s", rule, row["step"], message)
        alert = {
            "event": "alert",
            "step": row["step"],
            "epoch": row.get("epoch"),
            "alert": rule,
            "message": message,
        }
        if self._send is not None:
            self._send(alert)
        return {**alert, "timing": {"wall": time.time()}}

    # --- the rules: a message if one holds, "" if it does not, None for a report that does not measure it -------------

    def _loss_rise(self, row: Row, limit: float) -> str | None:
        loss = row.get("loss")
        if isinstance(loss, str):  # how rows have what is not finite
            return f"the loss is {loss}"
        if not isinstance(loss, float):
            return None
        if loss <= self._lowest + limit * abs(self._lowest):
            return ""
        return f"the loss is {loss:.4g}, and was {self._lowest:.4g}"

    def _data_wait(self, row: Row, limit: float) -> str | None:
        share = row["timing"].get("data_wait")
        if not is_number(share):  # a script may log anything under this name
            return None
        return f"{share:.0%} of the training time is spent waiting for data" if share > limit else ""

    def _no_checkpoint(self, row: Row, limit: float) -> str | None:
        passed = self._clock() - self._saved_at
        return f"no checkpoint for {passed:,.0f} s" if passed > limit else ""

    def _slow_rank(self, row: Row, limit: float) -> str | None:
        share, rank = row["timing"].get("slowest_rank_wait"), row["timing"].get("slowest_rank")
        if not is_number(share):
            return None
        return f"others wait {share:.0%} of the training time for rank {rank}" if share > limit else ""


class Webhook:
    """Posts alerts as JSON from a separate thread. What fails, or comes faster than it can be sent, is dropped."""

    def __init__(self, address: str) -> None:
        if not address.startswith(("https://", "http://")):
            raise ConfigError(Problem(WEBHOOK_VARIABLE, "***", "must begin with https:// or http://"))
        self._address = address
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._thread: threading.Thread | None = None
        atexit.register(self._finish)

    def send(self, alert: Mapping[str, Any]) -> None:
        """Send an alert soon. Returns at once, and never raises."""
        text = f"{alert['alert']} at step {alert['step']}: {alert['message']}"
        with self._lock:
            if len(self._waiting) == _MOST_WAITING:
                return
            self._waiting.append(json.dumps({**alert, "text": text}).encode())
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="windlass-alerts", daemon=True)
                thread.start()
                self._thread = thread  # not before: one that Ctrl-C kept from starting cannot be joined

    def _finish(self) -> None:
        """Called when the interpreter shuts down, as after an error of which the last alert tells."""
        thread = self._thread
        if thread is not None:
            thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None  # a later alert gets another one
                    return
                body = self._waiting.pop(0)
            request = urllib.request.Request(
                self._address, body, {"Content-Type": "application/json"}, method="POST"
            )
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT):
                    pass
            except Exception as error:  # the address must not be shown
                logger.warning("an alert could not be sent: %s", type(error).__name__)
