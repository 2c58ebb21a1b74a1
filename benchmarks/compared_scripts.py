"""Public training scripts through `windlass compare`: what differs in their first updates, and from which on.

    python benchmarks/compared_scripts.py FOLDER --write docs/compatibility.md

Scripts, their arguments and the stand-ins of the Hub are those of `public_scripts.py`; FOLDER is laid out as there. A
script that the folder lacks is named.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import caption, facts, rewrite, table
from public_scripts import (
    SECONDS,
    Recipe,
    cell,
    collect,
    environment,
    label,
    lacking,
    last_line,
    load,
    parser_of,
    prepared,
)

NAMES = ("rows", "learning_rate", "loss", "gradient_norm", "weights")


def compare(recipe: Recipe, folder: Path, standins: Path, updates: int) -> dict[str, Any]:
    """What `windlass compare --json` prints of a script; or `lacking`, or `failure`."""
    if reason := lacking(recipe, folder):
        return {"lacking": reason}
    with prepared(recipe, folder, standins) as (place, script):
        command = [sys.executable, "-m", "windlass", "compare", "--json", "--updates", str(updates)]
        done = subprocess.run(
            [*command, script, *recipe.arguments.split()],
            cwd=place, env=environment(recipe, standins, place), capture_output=True, text=True, errors="replace",
            timeout=2 * SECONDS, check=False,
        )  # fmt: skip
    if done.returncode:
        print(done.stderr[-6000:], file=sys.stderr)
        own = "its own libraries" in done.stderr
        return {
            "failure": f"{'with its own libraries' if own else 'with Windlass'}: {last_line(done.stderr)}"
        }
    return dict(json.loads(done.stdout))


def row(recipe: Recipe, found: dict[str, Any]) -> list[str]:
    """The line of a script in the table."""
    name = label(recipe)
    if fault := found.get("lacking") or found.get("failure"):
        return [name, cell(fault), *[""] * (len(NAMES) + 3)]
    own, ours = found["own"], found["windlass"]
    count = min(len(own["updates"]), len(ours["updates"]))
    apart = [
        f"from {found['from_update'][name]}" if name in found["from_update"] else "same" for name in NAMES
    ]
    if not found.get("rows_seen", True):
        apart[0] = "not seen"
    ratio = f"{ours['seconds'] / own['seconds']:.2f}" if own["seconds"] else ""
    unread = [
        f"{who}: {', '.join(one['set_and_not_read'])}"
        for who, one in (("own", own), ("Windlass", ours))
        if one["set_and_not_read"]
    ]
    design = f" ({recipe.differs})" if recipe.differs and found["from_update"] else ""
    why = cell(found["first_difference"] + design)
    return [name, str(count), *apart, ratio, why, cell("; ".join(unread))]


def render(recipes: list[Recipe], results: dict[str, Any], figures: dict[str, Any], updates: int) -> str:
    """The section of the page: scripts that ran, and the names of those that are absent."""
    ran = [recipe for recipe in recipes if "lacking" not in results[recipe.name]]
    absent = [label(recipe).split(" (")[0] for recipe in recipes if "lacking" in results[recipe.name]]
    head = ["script", "updates", *(name.replace("_", " ") for name in NAMES), "time, own = 1",
            "first difference", "set and not read"]  # fmt: skip
    rows = [row(recipe, results[recipe.name]) for recipe in ran]
    command = (
        f"python benchmarks/compared_scripts.py FOLDER --updates {updates} --write docs/compatibility.md"
    )
    missing = f"\n\nNot compared, since files or packages were absent: {', '.join(absent)}." if absent else ""
    return f"{table(head, rows)}\n\n{caption({**figures, 'command': command})}{missing}"


def main() -> None:
    parser = parser_of("compared scripts", description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    recipes = load(options.recipes)
    results = collect(options, recipes, functools.partial(compare, updates=options.updates), row)
    text = render([it for it in recipes if it.name in results], results, facts(), options.updates)
    if options.write:
        rewrite(options.write, "compared scripts", text)
    else:
        print(text)


if __name__ == "__main__":
    main()
