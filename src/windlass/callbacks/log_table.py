"""Logged values for people: short numbers, words for an event, and rows in columns."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from windlass.callbacks.rows import Metrics, is_number

# Heads of columns that would be wider than their numbers.
_HEADS = {
    "learning_rate": "lr",
    "mean_token_accuracy": "accuracy",
    "num_tokens": "tokens",
    "num_input_tokens_seen": "tokens_seen",
}
_NUMBER = 7  # characters of the longest short number without a sign
_HEADER_EVERY = 20  # rows: on a terminal of 24 lines the heads stay in sight


def short_number(value: float) -> str:
    """Return up to three significant digits, of any size in at most seven characters without the sign: `18.4k`, `6.13`,
    `3.0e-04`, `1.0e18`.
    """
    if not value or not math.isfinite(value):
        return str(value) if value else "0"
    scaled = value
    for unit in ("", "k", "M", "G", "T") if abs(value) >= 0.001 else ():
        digits = f"{scaled:#.3g}"
        if "e" not in digits:
            return digits.rstrip(".") + unit
        scaled /= 1000
    # An exponent of three digits and its sign leave room for one digit.
    return f"{value:.{0 if abs(value) < 1e-99 else 1}e}".replace("e+", "e")


def seconds_text(seconds: float) -> str:
    """Return `0.12 s`, `35 s` or `1:05`."""
    if seconds < 10:
        return f"{seconds:#.2g} s"
    return f"{seconds:.0f} s" if seconds < 60 else clock_text(seconds)


def clock_text(seconds: float) -> str:
    """Return seconds as `m:ss` or `h:mm:ss`; dashes if the time is not known."""
    if not 0 <= seconds < float("inf"):
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def moment_text(seconds: float | None) -> str:
    """Return a time of the clock as text, in the zone of this machine; empty if it is not known."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def words_of(logs: Metrics, max_str_len: int, *, brief: bool = False) -> list[str]:
    """Return one word for each value: `loss 0.251`. Runtimes and rates come last, with units instead of names, and the
    FLOP counter is left out.

    Args:
        max_str_len: longer strings are cut to this many characters, followed by their length.
        brief: as the only line for an event: no position and no rates of an evaluation, `eval_` before the first name
            only, and the names of columns.
    """
    has_samples = any(name.endswith("_samples_per_second") for name in logs)
    words: list[str] = []
    timing: list[str] = []
    for name, value in logs.items():
        if name == "total_flos" or (name.endswith("_steps_per_second") and has_samples):
            continue
        if brief and (name == "epoch" or (name.startswith("eval_") and name.endswith("_per_second"))):
            continue
        if name.endswith("_runtime") and _is_float(value):
            timing.append(seconds_text(value))
        elif name.endswith("_per_second") and _is_float(value):
            unit = name.removesuffix("_per_second").rpartition("_")[2]
            timing.append(f"{short_number(value)} {unit}/s")
        else:
            shown = _head(name.removeprefix("eval_")) if brief and words else name
            words.append(f"{shown} {_text(value, max_str_len)}")
    return words + timing


class LogTable:
    """Rows of losses in columns. Columns are added when a new value is logged, and the heads are repeated."""

    def __init__(self, total_steps: int) -> None:
        self.step_width = max(len("step"), len(str(total_steps)))
        self._names: list[str] = []
        self._shown: list[str] = []
        self._rows_below = 0
        self._reported: set[str] = set()

    def lines(self, step: int, logs: Metrics, columns: int) -> list[str]:
        """Return the row of `logs`, after the heads if they are due, each at most `columns` wide. The first time that
        values find no room, a line names them.
        """
        numbers = {name: value for name, value in logs.items() if is_number(value) and name != "total_flos"}
        self._names += [name for name in numbers if name not in self._names]
        self._names.sort(key="epoch".__eq__)  # the last one
        shown = self._that_fit(columns)
        lines = []
        if shown != self._shown or self._rows_below == _HEADER_EVERY:
            self._shown, self._rows_below = shown, 0
            lines = [
                *self._report_left_out(columns),
                self._line("step", {name: _head(name) for name in shown}),
            ]
        self._rows_below += 1
        return [*lines, self._line(str(step), {name: _cell(name, numbers[name]) for name in numbers})]

    def event(self, step: int | None, words: Iterable[str], columns: int) -> str:
        """Return words behind the step, as one line or, if they are too many, as several."""
        begin = ("" if step is None else str(step)).rjust(self.step_width)
        lines = [begin]
        for word in words:
            if len(lines[-1]) + 2 + len(word) > columns and lines[-1] != begin:
                lines.append(" " * self.step_width)
            lines[-1] += f"  {word}"
        return "\n".join(lines)

    def _that_fit(self, columns: int) -> list[str]:
        left, fitting = columns - self.step_width, []
        for name in self._names:
            left -= 2 + _width(name)
            if left >= 0:
                fitting.append(name)
        return fitting

    def _report_left_out(self, columns: int) -> list[str]:
        new = [name for name in self._names if name not in self._shown and name not in self._reported]
        self._reported.update(new)
        return [self.event(None, ["no room for", *new, "(see metrics.jsonl)"], columns)] if new else []

    def _line(self, step: str, cells: dict[str, str]) -> str:
        columns = (cells.get(name, "").rjust(_width(name)) for name in self._shown)
        return "  ".join([step.rjust(self.step_width), *columns]).rstrip()


def _head(name: str) -> str:
    return _HEADS.get(name, name)


def _width(name: str) -> int:
    return max(_NUMBER, len(_head(name)))


def _cell(name: str, value: float) -> str:
    # One form for the whole column: a schedule ends below the size at which other numbers change theirs.
    return f"{value:.1e}" if name == "learning_rate" else short_number(value)


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


def _text(value: Any, max_str_len: int) -> str:
    if _is_float(value):
        return short_number(value)
    if isinstance(value, str) and len(value) > max_str_len:
        return f"{value[:max_str_len]}... ({len(value)} characters)"
    return str(value)
