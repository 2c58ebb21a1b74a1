"""The page of a run: how soon it shows something, how large it is, and what following a run costs its server.

python benchmarks/page.py [--write docs/benchmarks.md]

The first paint is the browser's own figure (`performance.getEntriesByType("paint")`) for a page that is opened as a
file, the median of `--rounds`. Following is measured while a run of 10,000 rows writes a row a second and one page
follows it: processor time of the server, divided by the time on the clock.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import caption, facts, report, table

from windlass.callbacks.page_file import render_page
from windlass.callbacks.report import summarised
from windlass.callbacks.run_record import RunRecord
from windlass.callbacks.run_view import read_run
from windlass.config.arguments import TrainingArguments

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("compute", "data", "update", "exchange", "evaluation", "save", "callbacks")


def row(step: int) -> dict[str, Any]:
    """A report with the names that a run of `SFTTrainer` logs."""
    timing = {"wall": 1.7e9 + step, "elapsed": step, "mfu": 0.4, "data_wait": 0.01}
    timing |= {f"{unit}_per_second": 60.0 + step % 9 for unit in ("samples", "tokens")}
    timing |= {f"{kind}_seconds": 0.01 * (step % 7 + number) for number, kind in enumerate(KINDS)}
    for place in ("process", "device"):
        timing |= {f"{part}memory_{place}_gib": 3 + step % 5 / 10 for part in ("", "peak_")}
    values = {
        "loss": 3 / step**0.2,
        "grad_norm": 0.5 + step % 11 / 10,
        "learning_rate": 1 / (step + 9),
        "mean_token_accuracy": 1 - 1 / step**0.3,
        "entropy": 2 / step**0.1,
        "num_tokens": step * 4096,
    }
    return {"event": "log", "step": step, "epoch": step / 1000, **values, "timing": timing}


def write_run(folder: Path, steps: int) -> None:
    """Write the files of a run that logged every step."""
    args = TrainingArguments(str(folder), use_cpu=True, learning_rate=1e-4)
    nothing = {"from_step": 0, "seconds": 0.0, "samples": 0.0}
    RunRecord(folder, args, writes=True).begin(0, 2 * steps, nothing)
    with open(folder / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps(row(step)) + "\n" for step in range(1, steps + 1))


def written_page(folder: Path, steps: int) -> tuple[Path, float]:
    """Write the page of a run, and return its path and the seconds that it took."""
    write_run(folder, steps)
    began = time.perf_counter()
    page = folder / "report.html"
    page.write_text(render_page([summarised(read_run(folder))]))
    return page, time.perf_counter() - began


def first_paints(page: Path, rounds: int) -> list[float]:
    """Milliseconds from the start of the navigation to the first paint, of each round."""
    sys.path.insert(0, str(ROOT))
    from tests.browser import address_of, browser

    found = []
    with browser() as tab:
        for _ in range(rounds):
            tab.call("Page.navigate", url="about:blank")
            tab.open(address_of(page))
            found.append(float(tab.value("performance.getEntriesByType('paint')[0].startTime")))
    return found


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, int]]:
    """Run `windlass ui`; give its port and process."""
    command = [sys.executable, "-m", "windlass", "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)/", process.stdout.readline())
        assert found is not None
        yield int(found[1]), process.pid
    finally:
        process.kill()
        process.wait()


def processor_seconds(process: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def following_share(folder: Path, seconds: float) -> float:
    """Processor time of the server of one page that follows a run, divided by the time on the clock."""
    write_run(folder / "run", 10_000)
    with server(folder) as (port, process):
        asking = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        asking.request("GET", "/page?run=run")
        live = re.search(r'"live":"([^"]+)"', asking.getresponse().read().decode())
        assert live is not None
        asking.request("GET", "/" + json.loads(f'"{live[1]}"'))
        stream = asking.getresponse()
        threading.Thread(target=lambda: all(iter(stream.readline, b"")), daemon=True).start()
        time.sleep(2)
        began, before, step = time.perf_counter(), processor_seconds(process), 10_000
        while time.perf_counter() - began < seconds:
            step += 1
            with open(folder / "run" / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row(step)) + "\n")
            time.sleep(1)
        return (processor_seconds(process) - before) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60, help="of following")
    parser.add_argument("--write", type=Path, help="a page with a section `page` to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page, _ = written_page(folder / "short", 10_000)
        paints = first_paints(page, options.rounds)
        long, seconds = written_page(folder / "long", 100_000)
        share = following_share(folder / "live", options.seconds)
        figures = {
            **facts(("windlass",)),
            "first_paint_ms": paints, "bytes": long.stat().st_size, "render_seconds": seconds, "following": share,
        }  # fmt: skip
    rows = [
        ["first paint, 10,000 rows", f"{statistics.median(paints):.0f} ms", "300 ms"],
        ["size, 100,000 rows", f"{figures['bytes'] / 1e6:.2f} MB", "1 MB"],
        ["writing it", f"{seconds:.1f} s", ""],
        ["following a run of 10,000 rows", f"{share:.2%} of a core", "1 %"],
    ]
    text = f"{table(['the page of a run', 'measured', 'at most'], rows)}\n\n{caption(figures)}"
    report("page", text, figures, options.write, options.json)


if __name__ == "__main__":
    main()
