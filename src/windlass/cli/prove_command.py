"""`windlass prove`: train a small model of a recipe's kind on a layout and on one process, and compare all of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.cli.command_line import CommandParser, answer, names_and_overrides
from windlass.cli.proving.subject import Subject, find_subject
from windlass.core.errors import ConfigError, Problem
from windlass.core.output import say
from windlass.proofs.record import SCHEMA, Claim, versions, write_record
from windlass.proofs.small_config import AxisLayout

if TYPE_CHECKING:
    from windlass.cli.proving.proving_processes import EndedTraining, ProofVerdict

_EXIT_CODES = {"equal": 0, "differs": 1, "failed": 1, "refused": 2}
_WRONG = ("differs", "failed")
_HELP = """\
Prove that a layout of processes computes what one process computes. The recipe's model is made small, with the same
kinds of layers. One process trains it, and so do processes on the CPU in the layout, in float64; tokens, losses,
gradients, norms and weights must be equal.

  windlass prove my.yaml --layout tp=2,cp=2
  windlass prove config.json --layout dp_shard=2,tp=2

Axes: dp (replicas), dp_shard (FSDP), tp (layers), cp and sp (sequences), pp (pipelines), ep (experts). Above 8
processes each axis is tried with 2. Exit code 0: equal; 1: something differs; 2: the layout is refused.
"""


def prove_command(words: list[str]) -> int:
    parser = build_parser()
    options = parser.parse_intermixed_args(words)
    names, overrides = names_and_overrides(options.words)
    if len(names) > 1:
        parser.error(f"one recipe at a time: {' '.join(names)}")
    given = None if options.layout is None else AxisLayout.parse(options.layout)
    subject = find_subject(names[0] if names else None, overrides)
    layout = subject.layout if given is None else given
    if not layout.axes:
        fix = "there is nothing to compare on one process: give the sizes of axes, such as tp=2,cp=2"
        raise ConfigError(Problem("--layout", str(layout), fix))
    began = time.monotonic()
    claim, verdicts = prove(subject, layout, quiet=options.json)
    found = _facts(subject, layout, claim, verdicts)
    found["seconds"] = round(time.monotonic() - began, 1)
    code = answer(options, found, _lines(found), _EXIT_CODES[found["status"]])
    try:
        write_record(claim, found)
    except OSError as error:  # the answer took minutes
        say(f"the proof is not recorded, and runs will not find it: {error}", error=True)
    return code


def build_parser() -> CommandParser:
    usage = "windlass prove RECIPE [key=value ...] [--layout tp=2,cp=2] [--json]"
    parser = CommandParser(
        prog="windlass prove", usage=usage, description=_HELP, example="windlass prove my.yaml"
    )
    add = parser.add_argument
    words = "a recipe and overrides of its keys, or the config.json of a model"
    add("words", nargs="*", metavar="RECIPE | key=value", help=words)
    add(
        "--layout",
        metavar="AXES",
        help="axes and sizes, such as tp=2,cp=2 (default: what the recipe asks for)",
    )
    add("--json", action="store_true", help=f"as one JSON object of the schema {SCHEMA}")
    return parser


def _facts(
    subject: Subject, layout: AxisLayout, claim: Claim, verdicts: Sequence[ProofVerdict]
) -> dict[str, Any]:
    """Return what is printed for programs, and recorded."""
    whole, *parts = verdicts
    # The smallest layout that is wrong.
    wrong = next((one for one in (*parts, whole) if one.status in _WRONG), None)
    shown = wrong or whole
    if shown.first is not None:
        difference = str(shown.first)
    else:  # a failure is followed by what the process printed; a refusal has its reason below its first line
        difference = shown.detail if shown.status == "refused" else shown.detail.partition("\n")[0]
    return {
        "schema": SCHEMA,
        "key": claim.key(),
        "date": time.strftime("%Y-%m-%d"),
        "recipe": subject.name,
        "layout": str(layout),
        "tried": str(claim.layout),
        "proven": whole.is_equal,
        "status": whole.status,
        "axes": [] if wrong is None else wrong.layout.split(),
        "difference": difference,
        "verdicts": [asdict(one) for one in verdicts],
        "arguments": claim.facts,
        "model": claim.config,
        "versions": versions(),
    }


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The end of what is printed for people."""
    layout = found["layout"] + ("" if found["tried"] == found["layout"] else f" (as {found['tried']})")
    axes = found["axes"]
    if found["proven"]:
        yield f"\nproven: layout {layout} computes what one process computes. {found['seconds']:.0f} s"
    elif not axes:
        yield f"\nrefused: layout {layout}\n{found['difference']}"
    else:
        where = f"the axis is {axes[0]}" if len(axes) == 1 else f"the axes are {' with '.join(axes)}"
        alone = "" if len(axes) == 1 else ", each of which is equal alone"
        yield f"\nnot proven: layout {layout} does not compute what one process computes; {where}{alone}"
        yield f"  first     {found['difference']}"


def prove(subject: Subject, layout: AxisLayout, quiet: bool = False) -> tuple[Claim, list[ProofVerdict]]:
    """Try a layout; if something differs, the layouts of some of its axes, until one of them is wrong. Return what was
    tried, and the verdicts on the whole and on those layouts.
    """
    from windlass.cli.proving.proving_processes import ProvingProcesses, judge

    claim = Claim.of(subject.config, layout, subject.facts)
    report: Callable[[str], object] = (lambda line: None) if quiet else say
    report(subject.describe(claim))
    with tempfile.TemporaryDirectory(prefix="windlass-prove-") as folder:
        processes = ProvingProcesses(Path(folder), subject.module)
        alone: dict[bool, EndedTraining] = {}  # one process, alike for all layouts that do not divide experts

        def judged(layout: AxisLayout) -> ProofVerdict:
            joined = "ep" in layout.axes
            missing = () if joined in alone else (AxisLayout(()),)
            started = [processes.start(subject.trial(claim, one, joined)) for one in (*missing, layout)]
            if missing:
                alone[joined] = started[0].wait()
            verdict = judge(alone[joined], started[-1].wait())
            report(_row(verdict))
            return verdict

        try:
            verdicts = [judged(claim.layout)]
            for part in claim.layout.parts() if verdicts[0].status in _WRONG else ():
                verdicts.append(judged(part))
                if verdicts[-1].status in _WRONG:
                    break
        finally:
            processes.close()
    return claim, verdicts


def _row(verdict: ProofVerdict) -> str:
    if verdict.is_equal:
        text = (
            f"equal: {verdict.compared:,} values and tensors, which differ by {verdict.largest:.1g} at most"
        )
    elif verdict.status == "differs":
        text = f"differs: {verdict.differing:,} of {verdict.compared:,} values and tensors"
    else:
        text = verdict.status
    return f"  {verdict.layout:<18} {text}"
