"""Parts of a run's page that need no scripts: goodput, attempts, checkpoints with commands, differences, answers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass.callbacks.answers_log import FILE_NAME as ANSWERS
from windlass.callbacks.log_table import clock_text, moment_text
from windlass.callbacks.run_view import CheckpointView, RunView
from windlass.callbacks.samples_log import read_samples
from windlass.core.output import in_html
from windlass.core.plain_text import parse_json

# Of the newest answers, how many bytes and prompts a page shows, and how many steps side by side.
_ANSWER_BYTES, _MOST_PROMPTS, _MOST_STEPS, _MOST_LETTERS = 1 << 20, 20, 4, 1500


def render_notes(view: RunView) -> str:
    """Return what was damaged and left out as a list; empty if there is nothing."""
    notes = "".join(f"<li>{in_html(note)}</li>" for note in view.notes)
    return f'<ul class="notes" role="status">{notes}</ul>\n' if notes else ""


def render_facts(lines: Sequence[tuple[str, str]]) -> str:
    """Return names and values as a list; empty if there are none."""
    pairs = "".join(f"<dt>{in_html(name)}</dt><dd>{in_html(value)}</dd>" for name, value in lines)
    return f'<dl class="facts">{pairs}</dl>\n' if pairs else ""


def render_tables(view: RunView) -> dict[str, str]:
    """Return goodput, attempts, checkpoints, samples and generated answers of a run as HTML, each by its name."""
    return {
        "goodput": _goodput(view),
        "attempts": _attempts(view),
        "checkpoints": _checkpoints(view),
        "samples": _samples(view.folder),
        "answers": _answers(view.folder),
    }


def render_differences(views: Sequence[RunView]) -> str:
    """Return the table of settings that differ between runs; empty for one run, and for runs of equal settings."""
    settings = [{one.name: one.value for one in view.configuration} for view in views]
    rows = []
    for name in sorted({name for one in settings for name in one} - {"output_dir"}):
        values = [one.get(name, "default") for one in settings]
        if any(value != values[0] for value in values):
            rows.append([name, *map(str, values)])
    if not rows:
        return ""
    heads = ["setting", *(view.name for view in views)]
    return f"<h2>Differences between the runs</h2>\n{_table(heads, [map(in_html, row) for row in rows])}"


# --- time -------------------------------------------------------------------------------------------------------------


def _goodput(view: RunView) -> str:
    if view.ledger is None or view.ledger.wall <= 0:
        return ""
    shares = view.ledger.shares()
    parts = "".join(
        f'<span class="part k-{kind}" style="flex-grow:{share:.5f}" title="{_kind(kind)} {share:.1%}"></span>'
        for kind, share in shares.items()
    )
    legend = "".join(
        f'<span class="key k-{kind}">{_kind(kind)} {share:.1%} ({clock_text(view.ledger.seconds[kind])})</span>'
        for kind, share in shares.items()
    )
    head = f"Goodput {view.ledger.goodput:.1%} of {clock_text(view.ledger.wall)}"
    return (
        f'<h2>{head}</h2>\n<div class="card"><div class="goodput" role="img" aria-label="{head}">{parts}</div>'
        f'<div class="legend">{legend}</div></div>\n'
    )


def _kind(kind: str) -> str:
    return in_html(kind.replace("_", " "))


def _attempts(view: RunView) -> str:
    if len(view.attempts) < 2:
        return ""
    rows = (
        (
            str(one.number), in_html(moment_text(one.began)),
            f"{one.from_step:,}", f"{one.step:,}", f"{one.repeated:,}",
            in_html(one.status + (f": {one.reason}" if one.reason else "")),
            "<br>".join(in_html(f"{name}: {pair[0]!r} -> {pair[1]!r}") for name, pair in one.changed.items()),
        )
        for one in view.attempts
    )  # fmt: skip
    heads = ("attempt", "began", "from step", "to step", "repeated", "ended", "changed arguments")
    return f"<h2>Attempts</h2>\n{_table(heads, rows)}"


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _checkpoints(view: RunView) -> str:
    if not view.checkpoints:
        return ""
    rows = (
        (
            in_html(one.path.name), f"{one.step:,}", in_html(moment_text(one.saved_at)),
            "" if one.nbytes is None else f"{one.nbytes / 1e6:,.1f} MB",
            "" if one.metric is None else in_html(f"{one.metric:.5g}"), in_html(_state(one)),
            "".join(_copied(command) for command in _commands(one, view)),
        )
        for one in reversed(view.checkpoints)
    )  # fmt: skip
    heads = ("checkpoint", "step", "saved", "size", "metric", "state", "commands")
    return f"<h2>Checkpoints</h2>\n{_table(heads, rows)}"


def _state(one: CheckpointView) -> str:
    if one.problem is not None:
        return f"damaged: {one.problem}"
    words = ["every byte verified" if one.verified else "committed, all files in their sizes"]
    return ", ".join(words + ["best"] * one.is_best + ["only to resume"] * one.ephemeral)


def _commands(one: CheckpointView, view: RunView) -> Iterator[str]:
    """Yield commands that only read the checkpoint, or write elsewhere."""
    path = shlex.quote(str(one.path.absolute()))
    yield f"windlass checkpoint verify {path}"
    if one.problem is None:
        yield f"windlass checkpoint export {path} {shlex.quote(f'{view.name}-{one.step}')}"
        yield f"trainer.train(resume_from_checkpoint={str(one.path.absolute())!r})"


def _copied(command: str) -> str:
    text = in_html(command)
    return f'<button class="copy" type="button" data-copy="{text}" title="copy: {text}"><code>{text}</code></button>'


# --- samples and generated answers ------------------------------------------------------------------------------------


def _samples(folder: Path) -> str:
    """Rows of the training data, with what is trained on marked."""
    rows = []
    for one in read_samples(folder)[:_MOST_PROMPTS]:
        text = "".join(
            f"<mark>{in_html(piece)}</mark>" if trained else in_html(piece)
            for piece, trained in _first_letters(one["pieces"])
        )
        label = (
            f'<div class="more">label: <mark>{in_html(one["label"])}</mark></div>' if "label" in one else ""
        )
        rows.append(
            [
                f'{in_html(one["name"])}<div class="more">{_counts(one)}</div>',
                f'<div dir="auto">{text}</div>{label}',
            ]
        )
    head = '<h2>Samples of the data</h2>\n<p class="muted"><mark>Marked</mark>: trained on.</p>\n'
    return head + _table(("sample", "as the model gets it"), rows) if rows else ""


def _counts(sample: Mapping[str, Any]) -> str:
    if not sample["tokens"]:
        return ""
    trained = f"{sample['trained']:,} of " if sample["trained"] or "label" not in sample else ""
    return f"{trained}{sample['tokens']:,} tokens{' trained' if trained else ''}"


def _first_letters(pieces: Sequence[Sequence[Any]]) -> Iterator[tuple[str, bool]]:
    left = 2 * _MOST_LETTERS
    for text, trained in pieces:
        if left > 0:
            yield text[:left], trained
        left -= len(text)


def _answers(folder: Path) -> str:
    """The newest answers to the same prompts, side by side over the steps."""
    rows = list(_answer_rows(folder / ANSWERS))
    steps = sorted({row["step"] for row in rows})[-_MOST_STEPS:]
    by_prompt: dict[tuple[str, ...], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        key = (str(row.get("set")), str(row.get("number")), _words(row["prompt"]))
        by_prompt.setdefault(key, {})[row["step"]] = row
    table = []
    for (*_, prompt), found in list(by_prompt.items())[:_MOST_PROMPTS]:
        reference = found[max(found)].get("reference")
        cells = [_text(prompt), _text("" if reference is None else _words(reference))]
        table.append(cells + [_answer(found.get(step)) for step in steps])
    if not table or not steps:
        return ""
    heads = ("prompt", "reference", *(f"step {step:,}" for step in steps))
    return f"<h2>Generated answers</h2>\n{_table(heads, table)}"


def _answer_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _ANSWER_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines[:-1]:  # the last one is empty, or is written now
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and "prompt" in row:
            yield row


def _words(value: Any) -> str:
    """A prompt, reference or answer as text: of messages, their contents."""
    if isinstance(value, list):
        return "\n".join(map(_words, value))
    if isinstance(value, dict):
        return f"{value.get('role', '')}: {value.get('content', '')}"
    return str(value)


def _text(text: str) -> str:
    return f'<div dir="auto" class="sample">{in_html(text[:_MOST_LETTERS])}</div>'


def _answer(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    scores = row.get("scores")
    pairs = scores.items() if isinstance(scores, dict) else ()
    shown = ", ".join(f"{name} {value:.3g}" for name, value in pairs if isinstance(value, int | float))
    return _text(_words(row.get("answer", ""))) + (
        f'<div class="more">{in_html(shown)}</div>' if shown else ""
    )


# --- parts ------------------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Any) -> str:
    """A table whose cells are HTML already, and its heads text."""
    head = "".join(f"<th>{in_html(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n'
