"""Draws pairs and triples of features at random, and asks each case six questions.

    python -m tests.reliability.combinations --cases 100 --seed 1 --write combinations.jsonl
    python -m tests.reliability.combinations --only with=trainer,ranks=ddp-2,optim=muon,adapter=dora,kill=0.4

A case is refused before its first update with one clear error, or it trains, and then: killed at an instant and resumed
it has the same bits; two processes equal one; an evaluation changes nothing; what it saved gives the evaluation that it
reported; and every feature had its effect. Cases that fall short are printed as a SPEC that repeats them. The exit code
is 1 if there are any. The features are in `combined/features.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from tests.reliability.attempts import preload
from tests.reliability.combined.case import Case, draw, parse
from tests.reliability.combined.questions import HELD, REFUSED, SHORT, examine
from tests.reliability.kill_matrix import memory

# Between them they import nearly all that the others do.
PRELOADED = ("with=sft,model=llama,adapter=lora", "with=loop,model=llama")


class Combinations:
    """Examines cases in a folder.

    Args:
        jobs: how many at the same time.
    """

    def __init__(self, place: Path, jobs: int) -> None:
        self._place = place
        preload(_train_once, place)
        # Its processes are forked here, while this one has a single thread.
        self._pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"))

    def examine(self, cases: Sequence[Case], tell: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
        """Give what came of each; `tell` is called with each as it comes."""
        waiting = [
            self._pool.submit(_examined, case, self._place / f"case-{number}")
            for number, case in enumerate(cases)
        ]
        results = []
        for future in as_completed(waiting):
            results.append(future.result())
            tell(results[-1])
        return results

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def combinations_in(place: Path, jobs: int) -> Iterator[Combinations]:
    made = Combinations(place, jobs)
    try:
        yield made
    finally:
        made.close()


def examine_apart(
    cases: Sequence[Case], place: Path, jobs: int, tell: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """As `Combinations.examine`, each case in a process of its own that has imported nothing: one that has asked for an
    accelerator cannot be forked with it, and libraries ask while they are imported.
    """
    context, results = multiprocessing.get_context("spawn"), []
    with ThreadPoolExecutor(jobs) as threads:

        def one(number: int) -> dict[str, Any]:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_tell, args=(cases[number], place / f"case-{number}", theirs))
            process.start()
            theirs.close()
            found: dict[str, Any] = ours.recv()
            process.join()
            return found

        for future in as_completed([threads.submit(one, number) for number in range(len(cases))]):
            results.append(future.result())
            tell(results[-1])
    return results


def _tell(case: Case, folder: Path, end: Any) -> None:
    end.send(_examined(case, folder))


def _train_once(folder: Path) -> None:
    from tests.reliability.combined.loop import train_in_a_loop
    from tests.reliability.combined.recipe import Outcome
    from tests.reliability.combined.training import train
    from tests.reliability.combined.watch import Instants

    for number, spec in enumerate(PRELOADED):
        recipe = parse(spec).recipe()
        run = train_in_a_loop if recipe.kind == "loop" else train
        run(recipe, folder / str(number), Instants(None), Outcome(), False)()


def _examined(case: Case, folder: Path) -> dict[str, Any]:
    return examine(case, folder).plain()


def show(result: dict[str, Any], written: Path | None) -> None:
    """One line for each case that falls short, and for each thing in which it does; every case goes to the file."""
    if written is not None:
        with written.open("a") as file:
            file.write(json.dumps(result) + "\n")
    if result["verdict"] == SHORT:
        print(f"short: --only {result['spec']}")
        for problem in result["problems"]:
            print(f"    {problem}", flush=True)


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Counts, and the errors with which cases were refused."""
    counts = Counter(result["verdict"] for result in results)
    lines = [
        f"{len(results)} cases: " + ", ".join(f"{counts[name]} {name}" for name in (HELD, REFUSED, SHORT))
    ]
    questions = Counter(" ".join(name.split()[:4]) for result in results for name in result["asked"])
    lines += [f"  {number:5} answers: {name}" for name, number in questions.most_common(5)]
    met = {
        pair
        for result in results
        if result["verdict"] == HELD
        for pair in combinations(sorted(result["spec"].split(",")[:-1]), 2)
    }
    lines.append(f"  {len(met)} pairs of values trained together")
    refusals = Counter(_in_short(result["refused"]) for result in results if result["refused"])
    lines += [f"  {number:5} refused: {text}" for text, number in refusals.most_common()]
    return "\n".join(lines)


def _in_short(refusal: str) -> str:
    return " ".join(line.strip() for line in refusal.splitlines()[-2:])[:150]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", action="store_true", help="cases of one process on this machine's")
    parser.add_argument("--only", metavar="SPEC", help="one case; its folder is kept if it falls short")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", type=Path, help="a file to which one line of JSON is added for each case")
    given = parser.parse_args(words)
    try:
        drawn = (draw(given.seed, number, given.accelerator) for number in range(given.cases))
        cases = [parse(given.only)] if given.only else list(drawn)
    except ValueError as error:
        parser.error(f"--only: {error}")
    if given.accelerator and not torch.accelerator.is_available():
        parser.error("--accelerator: PyTorch sees none on this machine")
    place, started = Path(tempfile.mkdtemp(prefix="windlass-combinations-", dir=memory())), time.monotonic()
    if given.accelerator:
        results = examine_apart(cases, place, given.jobs, lambda result: show(result, given.write))
    else:
        with combinations_in(place, given.jobs) as made:
            results = made.examine(cases, lambda result: show(result, given.write))
    print(f"{summary(results)}\n{time.monotonic() - started:.0f} s")
    if not any(result["verdict"] == SHORT for result in results):
        shutil.rmtree(place)
        return 0
    print(f"folders of those that fall short: {place}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
