"""What the benchmarks share: the facts of the machine, percentiles, tables, and the section of a page they rewrite."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.core.optional import version_of

PACKAGES = ("torch", "windlass", "transformers", "accelerate", "lightning")
# Options that name a file for the results.
_RESULTS = ("--write", "--json", "--raw", "--plot")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Python's and each installed package's version."""
    own = {"windlass": __version__}
    found = {name: own.get(name) or version_of(name) for name in packages}
    return {"python": platform.python_version()} | {name: it for name, it in found.items() if it is not None}


def processor() -> str:
    """Model name of the processor as the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def typed() -> str:
    """The command that measures, without where its results go."""
    words, left = iter(sys.argv[1:]), ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    for word in words:
        if word in _RESULTS:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in _RESULTS)):
            left.append(word)
    return shlex.join(left)


def facts(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Command, date, machine and versions: without them a figure says nothing."""
    return {
        "command": typed(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": versions(packages),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of `values` lie, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def caption(found: dict[str, Any]) -> str:
    """The sentence under a table: how, when, where and with what it was measured."""
    named = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"`{found['command']}` on {found['date']}; {found['machine']}; {named}."


def rewrite(page: Path, section: str, text: str) -> None:
    """Replace what stands between `<!-- begin: section -->` and `<!-- end: section -->` in `page`."""
    begin, end = f"<!-- begin: {section} -->", f"<!-- end: {section} -->"
    before, found_begin, rest = page.read_text("utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"{page} has no section {begin} ... {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")


def report(section: str, text: str, figures: dict[str, Any], page: Path | None, raw: Path | None) -> None:
    """Print the table, and write it into `page` and the figures into `raw` where asked."""
    print(text)
    if raw is not None:
        raw.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    if page is not None:
        rewrite(page, section, text)
        print(f"\nwritten to {page}")
