"""Public training scripts, with the library that they were written for and with `windlass run`: losses and seconds.

Scripts are not copied here: `script_recipes/recipes.yaml` has for each its repository, commit or release, sha256 and
the arguments that make a run tiny. FOLDER holds the files, as REPOSITORY/COMMIT/PATH (or REPOSITORY/RELEASE/PATH); what
it lacks is reported with the place to get it from. What scripts would load from the Hub is made in a temporary folder,
where they run without network (`script_recipes/standins.py`), on one thread, each in a process of its own.

    python benchmarks/public_scripts.py FOLDER --write docs/compatibility.md

Rows of scripts without a result stay on the page as they are. With `--json FILE` the results are kept in FILE, and
scripts that it has results of are not run again unless `--only` names them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from common import caption, facts, rewrite, table

HERE = Path(__file__).resolve().parent
RECIPES = HERE / "script_recipes" / "recipes.yaml"
PROBE = HERE / "script_recipes" / "probe.py"
SECONDS = 900
SAME = "none, same bits"


@dataclass(frozen=True)
class Recipe:
    """How one script is run.

    Attributes:
        version: the commit, or the release as pip names it (`trl==1.16.0`), that the file is of.
        sha256: of each file, by path in the repository; the script is the first.
        figures: where its losses come from; see `probe.py`.
        needs: modules that must be installed.
        patch: pairs of texts, the second of which takes the place of the first.
        why: the reason for the patch.
        differs: the reason for a difference of the losses that is by design.
    """

    name: str
    repository: str
    version: str
    sha256: dict[str, str]
    arguments: str = ""
    figures: str = "log"
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    patch: tuple[tuple[str, str], ...] = ()
    why: str = ""
    differs: str = ""

    def place(self, folder: Path, path: str) -> Path:
        return folder / self.repository / self.version / path

    def source(self, path: str) -> str:
        """Where the file can be got."""
        if "==" in self.version:
            return f"pip download --no-deps {self.version}, file {path}"
        return f"https://github.com/{self.repository}/raw/{self.version}/{path}"


@dataclass(frozen=True)
class Outcome:
    """One run: why it failed, if it did; its losses by name, in order; user and system seconds of all its processes."""

    failure: str
    losses: list[tuple[str, float]]
    seconds: float


def load(path: Path) -> list[Recipe]:
    """The recipes of a file.

    Raises:
        SystemExit: two have one name, or a field is unknown, missing or of the wrong form.
    """
    recipes = []
    for row in yaml.safe_load(path.read_text("utf-8")):
        try:
            listed = {name: tuple(row.get(name, ())) for name in ("needs",)}
            patch = tuple((old, new) for old, new in row.get("patch", ()))
            recipe = Recipe(**{**row, **listed, "patch": patch})
        except (TypeError, ValueError) as error:
            raise SystemExit(f"{path}: recipe {row.get('name', row)!r}: {error}") from error
        if bool(recipe.patch) != bool(recipe.why):
            raise SystemExit(
                f"{path}: recipe {recipe.name!r}: a patch has a reason (`why`), and no patch has none"
            )
        recipes.append(recipe)
    names = [recipe.name for recipe in recipes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SystemExit(f"{path}: several recipes are named {', '.join(twice)}")
    return recipes


def lacking(recipe: Recipe, folder: Path) -> str:
    """Why a recipe cannot be run here: files or packages that are absent; empty if it can.

    Raises:
        SystemExit: a file is not the one that the recipe is for.
    """
    for path, expected in recipe.sha256.items():
        file = recipe.place(folder, path)
        if not file.is_file():
            return f"absent: {recipe.source(path)}"
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != expected:
            raise SystemExit(f"{file} has sha256 {found}; the recipe {recipe.name!r} is for {expected}")
    missing = [name for name in recipe.needs if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def patched(recipe: Recipe, text: str) -> str:
    """The script with the patch of its recipe.

    Raises:
        SystemExit: the script has no such text.
    """
    for old, new in recipe.patch:
        if old not in text:
            raise SystemExit(
                f"the patch of {recipe.name!r} does not apply: there is no {old!r} in the script"
            )
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def prepared(recipe: Recipe, folder: Path, standins: Path) -> Iterator[tuple[Path, str]]:
    """A folder with the script, its patch applied, and the stand-ins; and the script's path in it."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for entry in standins.iterdir():
            if entry.name != "hub":
                (place / entry.name).symlink_to(entry)
        scripts = place / "scripts"
        scripts.mkdir()
        first, *rest = recipe.sha256
        for path in (first, *rest):
            text = recipe.place(folder, path).read_text("utf-8")
            (scripts / Path(path).name).write_text(patched(recipe, text) if path == first else text, "utf-8")
        yield place, f"scripts/{Path(first).name}"


def run(recipe: Recipe, folder: Path, standins: Path, before: list[str]) -> Outcome:
    """Run a script once, with `before` as the words that start Python code."""
    with prepared(recipe, folder, standins) as (place, script):
        losses = place / "losses.json"
        words = [str(PROBE), str(losses), recipe.figures, script]
        started = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(
                [*before, *words, *recipe.arguments.split()],
                cwd=place,
                env=environment(recipe, standins, place),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
            failure, output = "" if done.returncode == 0 else last_line(done.stdout), done.stdout
        except subprocess.TimeoutExpired:
            failure, output = f"stopped after {SECONDS} s", ""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        if failure:
            print(output[-6000:], file=sys.stderr)
        seconds = ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime
        found = json.loads(losses.read_text("utf-8")) if losses.exists() else []
        return Outcome(failure, [(name, value) for name, value in found], seconds)


def environment(recipe: Recipe, standins: Path, place: Path) -> dict[str, str]:
    """The variables of a run: no network, one thread, no folder of the user's."""
    own = {
        "HF_HOME": str(place / "home"),
        "HF_MODULES_CACHE": str(standins / "hub" / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "1",
    }
    return {**os.environ, **own, **recipe.environment}


def last_line(output: str) -> str:
    """The line of an output that names the error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (named or lines or ["no output"])[-1][:300]


def difference(one: list[tuple[str, float]], other: list[tuple[str, float]]) -> str:
    """The largest difference of two runs' losses in words."""
    if not one and not other:
        return "no losses"
    if [name for name, _ in one] != [name for name, _ in other]:
        return f"{len(one)} and {len(other)} losses"
    largest: dict[str, float] = {}
    for (name, a), (_, b) in zip(one, other, strict=True):
        if a != b:
            largest[name] = max(largest.get(name, 0.0), abs(a - b))
    if not largest:
        return SAME
    others = {name for name, _ in one} - largest.keys()
    rest = f"; {', '.join(sorted(others))}: {SAME}" if others else ""
    return ", ".join(f"{name}: {value:.1e}" for name, value in largest.items()) + rest


def measure(recipe: Recipe, folder: Path, standins: Path) -> dict[str, Any]:
    """The result of a recipe: `lacking`, or the outcomes with the original library and with Windlass."""
    if reason := lacking(recipe, folder):
        return {"lacking": reason}
    ways = {"original": [sys.executable], "windlass": [sys.executable, "-m", "windlass", "run"]}
    return {name: asdict(run(recipe, folder, standins, words)) for name, words in ways.items()}


def row(recipe: Recipe, result: dict[str, Any] | None) -> list[str]:
    """The line of a recipe in the table."""
    name, change = label(recipe), recipe.why or "no"
    if result is None or "lacking" in result:
        return [name, change, "not run: " + (result["lacking"] if result else "no result"), "", "", "", ""]
    original, ours = result["original"], result["windlass"]
    seconds = [f"{it['seconds']:.0f}" for it in (original, ours)]
    if original["failure"]:
        works = "works" if not ours["failure"] else "fails too"
        text = f"the original fails: {cell(original['failure'])}; {works} with Windlass"
        return [name, change, text, "", "", *seconds]
    if ours["failure"]:
        return [name, change, f"no: {cell(ours['failure'])}", "", "", *seconds]
    pairs = [[(key, value) for key, value in it["losses"]] for it in (original, ours)]
    apart = difference(*pairs)
    if recipe.differs and apart != SAME:
        apart = f"{apart} ({recipe.differs})"
    return [name, change, "yes", str(len(pairs[0])), apart, *seconds]


def label(recipe: Recipe) -> str:
    """The first cell of a recipe's line."""
    version = recipe.version if "==" in recipe.version else recipe.version[:8]
    return f"{recipe.repository} `{next(iter(recipe.sha256))}` ({version})"


def rows_of(page: str) -> dict[str, list[str]]:
    """The lines of the table on a page, by their first cells."""
    section = page.partition("<!-- begin: public scripts -->")[2].partition("<!-- end: public scripts -->")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    return {first: [first, *others] for first, *others in cells}


def cell(text: str) -> str:
    """A text that does not end a cell of a table, and keeps nothing of the folders of this run."""
    words = [Path(word).name if word.startswith("/") else word for word in text.replace("|", "/").split()]
    return " ".join(words)


def render(recipes: list[Recipe], results: dict[str, Any], figures: dict[str, Any], page: str = "") -> str:
    """The section of the page; `page` is what it is now."""
    head = ["script", "changed", "runs", "losses", "largest difference", "CPU s, original", "CPU s, Windlass"]
    now, before = {it.name: row(it, results.get(it.name)) for it in recipes}, rows_of(page)
    rows = [now[it.name] if it.name in results else before.get(label(it), now[it.name]) for it in recipes]
    ran = sum(line[2] == "yes" for line in rows)
    exact = sum(line[4] == SAME for line in rows)
    original = ran + sum(line[2].startswith("no: ") for line in rows)
    summary = (
        f"{len(rows)} scripts: {original} run with the original library on this machine, {ran} of these with Windlass, "
        f"{exact} of these with the same bits in every loss."
    )
    command = "python benchmarks/public_scripts.py FOLDER --write docs/compatibility.md"
    return f"{summary}\n\n{table(head, rows)}\n\n{caption({**figures, 'command': command})}"


def parser_of(section: str, **description: Any) -> argparse.ArgumentParser:
    """The options of a command that runs recipes and rewrites a section of a page."""
    parser = argparse.ArgumentParser(**description)
    parser.add_argument("folder", type=Path, help="the folder with the scripts")
    parser.add_argument("--recipes", type=Path, default=RECIPES)
    parser.add_argument(
        "--data", type=Path, default=HERE.parents[1] / "shared" / "data", help="texts for the stand-ins"
    )
    parser.add_argument("--only", help="names of recipes to run, separated by commas")
    parser.add_argument("--write", type=Path, help=f"a page with a section `{section}` to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the results, kept from run to run")
    return parser


def collect(
    options: argparse.Namespace,
    recipes: list[Recipe],
    run: Callable[[Recipe, Path, Path], dict[str, Any]],
    shown: Callable[[Recipe, dict[str, Any]], list[str]],
) -> dict[str, Any]:
    """Run the recipes that are asked for, or else those without a result; return the results of all, by name.

    Args:
        run: recipe, folder of the scripts, stand-ins -> its result.
        shown: the words that are printed of a result.
    """
    results = json.loads(options.json.read_text("utf-8")) if options.json and options.json.exists() else {}
    named = options.only.split(",") if options.only else None
    if unknown := sorted(set(named or ()) - {recipe.name for recipe in recipes}):
        raise SystemExit(f"there are no recipes {', '.join(unknown)}")
    chosen = [it for it in recipes if (it.name in named if named else it.name not in results)]
    folder = options.folder.absolute()
    with tempfile.TemporaryDirectory() as temporary:
        if any(not lacking(recipe, folder) for recipe in chosen):
            from script_recipes.standins import make

            make(Path(temporary), options.data)
        for recipe in chosen:
            results[recipe.name] = run(recipe, folder, Path(temporary))
            print(*shown(recipe, results[recipe.name]), sep=" | ", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return dict(results)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    options = parser_of("public scripts", description=__doc__, formatter_class=formatter).parse_args()
    recipes = load(options.recipes)
    results = collect(options, recipes, measure, lambda recipe, found: [recipe.name, *row(recipe, found)[2:]])
    page = options.write.read_text("utf-8") if options.write else ""
    text = render(recipes, results, facts(), page)
    print(text)
    if options.write:
        rewrite(options.write, "public scripts", text)


if __name__ == "__main__":
    main()
