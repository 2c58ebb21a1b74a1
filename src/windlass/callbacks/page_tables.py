"""Parts of a run's page that need no scripts: figures, settings, goodput, attempts, checkpoints with commands,
differences, answers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.callbacks.answers_log import FILE_NAME as ANSWERS
from windlass.callbacks.charts import Point, short
from windlass.callbacks.log_table import clock_text, moment_text
from windlass.callbacks.rows import described_event, is_number, is_timing
from windlass.callbacks.run_view import Configured, RunView
from windlass.callbacks.samples_log import read_samples
from windlass.checkpoint.survey import Found
from windlass.core.output import in_html
from windlass.core.whole_file import newest_lines


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """The time of all sessions of a run, without updates that were repeated."""

    # `seconds`, `samples`, `updates`: since `from_step`; samples are known of a run that ended
    seconds: float
    samples: float | None
    updates: int
    from_step: int  # 0, unless the run continues one of which this is not recorded
    sessions: int  # calls of `train()`
    repeated: int  # updates that were made again after interruptions, as far as they were logged before


History = Sequence[Mapping[str, Any]]

# Of one session; a tile has that of all.
_SPEED = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


def render_details(
    history: History,
    facts: Mapping[str, Any],
    time: TrainingTime | None = None,
    configuration: Sequence[Configured] = (),
) -> dict[str, str]:
    """Return the figures and tables of a run as HTML without scripts, each by its name.

    Args:
        history: the rows of `metrics.jsonl` as metrics; each has `step`, most have `epoch`.
        facts: any of `data`, `environment` (name -> value).
        time: of all sessions; None if only that of the last one is known, from its summary in `history`.
        configuration: what differs from the defaults.
    """
    rows = [row for row in history if described_event(row) is None]
    return {
        "tiles": _tiles(rows, time),
        "evaluations": _evaluations(rows),
        "metrics": _cards("Details", {"Final metrics": _final(rows), "Events": _events(history)}),
        "configuration": _configuration(configuration),
        "settings": _cards(
            "Data and environment", {"Data": facts.get("data"), "Environment": facts.get("environment")}
        ),
    }


def _configuration(found: Sequence[Configured]) -> str:
    if not found:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{in_html(one.name)}</th><td class="num">{_cell(one.value)}</td>'
        f'<td class="muted">{in_html(one.source)}</td></tr>\n'
        for one in found
    )
    head = "<tr><th>setting</th><th>value</th><th>set in</th></tr>"
    table = f"<table><thead>{head}</thead><tbody>\n{rows}</tbody></table>"
    return f'<h2>Settings that differ from their defaults</h2>\n<div class="card">{table}</div>\n'


def _events(history: History) -> dict[str, str]:
    """Return what happened once, with a number, which distinguishes equal events."""
    found = [
        (row.get("step", "?"), event[1]) for row in history if (event := described_event(row)) is not None
    ]
    return {f"{number}. step {step}": text for number, (step, text) in enumerate(found, start=1)}


def curve(history: History, name: str) -> list[Point]:
    """Return `(step, value)` of every row that has the metric as a number."""
    return [(float(row.get("step", 0)), float(row[name])) for row in history if is_number(row.get(name))]


def evaluation_losses(history: History) -> list[str]:
    """Return names such as `eval_loss` and `eval_news_loss` with values, in order of appearance."""
    losses = [name for name in _names(history) if name.startswith("eval_") and name.endswith("_loss")]
    return [name for name in losses if curve(history, name)]


# --- the parts of the page


def _tiles(history: History, time: TrainingTime | None) -> str:
    loss = curve(history, "loss")
    tiles: list[tuple[str, Any, str]] = []
    if loss:
        tiles.append(("Training loss", loss[-1][1], f"from {short(loss[0][1])} at step {short(loss[0][0])}"))
    for name in evaluation_losses(history)[:1]:
        step, best = min(curve(history, name), key=lambda p: (math.isnan(p[1]), p[1]))
        tiles.append((f"Best {name}", best, f"at step {short(step)}"))
    if history:
        epoch = _last(history, "epoch")
        steps = max(float(row.get("step", 0)) for row in history)
        tiles.append(("Updates", steps, f"{short(epoch)} epochs" if epoch is not None else ""))
    runtime, speed = _last(history, "train_runtime"), _last(history, "train_samples_per_second")
    if time is not None:
        tiles.append(("Training time", _duration(time.seconds), ", ".join(_told(time))))
    elif runtime is not None:
        rate = f"{short(speed)} samples per second" if speed is not None else ""
        tiles.append(("Training time of the last session", _duration(runtime), rate))
    cells = "".join(
        f'<div class="card tile"><div class="label">{in_html(label)}</div><div class="value">{_cell(value)}</div>'
        f'<div class="more">{in_html(more)}</div></div>'
        for label, value, more in tiles
    )
    return f'<div class="tiles">{cells}</div>\n' if cells else ""


def _duration(seconds: float) -> str:
    return clock_text(seconds) if seconds >= 60 else f"{short(seconds, 3)} s"


def _told(time: TrainingTime) -> Iterator[str]:
    if time.seconds > 0 and time.samples:
        yield f"{short(time.samples / time.seconds)} samples per second"
    elif time.seconds > 0 and time.updates:
        yield f"{short(time.updates / time.seconds)} updates per second"
    if time.from_step:
        yield f"since step {time.from_step:,}"
    if time.sessions > 1:
        yield f"in {time.sessions} sessions"
    if time.repeated:
        yield f"{time.repeated:,} updates repeated"


def _evaluations(history: History) -> str:
    rows = [row for row in history if any(name.startswith("eval_") for name in row)]
    names = [name for name in _names(rows) if name.startswith("eval_") and not is_timing(name)]
    if not names:
        return ""
    columns = ("step", "epoch", *names)
    head = "".join(f"<th>{in_html(name)}</th>" for name in columns)
    cells = [[f'<td class="num">{_cell(row.get(name, ""))}</td>' for name in columns] for row in rows]
    lines = "".join(f"<tr>{''.join(line)}</tr>\n" for line in cells)
    table = f'<table class="wide"><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>'
    return f'<h2>Evaluations</h2>\n<div class="card">{table}</div>\n'


def _cards(title: str, tables: Mapping[str, Mapping[str, Any] | None]) -> str:
    shown = "".join(_pairs(name, values) for name, values in tables.items())
    return f'<h2>{title}</h2>\n<div class="columns">{shown}</div>\n' if shown else ""


def _pairs(title: str, values: Mapping[str, Any] | None) -> str:
    if not values:
        return ""
    cells = [(in_html(str(name)), _cell(value)) for name, value in values.items()]
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td class="num">{value}</td></tr>\n' for name, value in cells
    )
    table = f"<table><caption>{in_html(title)}</caption><tbody>\n{rows}</tbody></table>"
    return f'<div class="card">{table}</div>\n'


# --- values


def _names(history: History) -> list[str]:
    """Return all names, each once, in order of appearance."""
    return list(dict.fromkeys(name for row in history for name in row))


def _final(history: History) -> dict[str, Any]:
    """Return the last value of each metric without a curve."""
    latest = {name: value for row in history for name, value in row.items()}
    shown = ("step", "loss", "grad_norm", "learning_rate", *_SPEED)
    return {name: value for name, value in latest.items() if name not in shown}


def _last(history: History, name: str) -> float | None:
    values = curve(history, name)
    return values[-1][1] if values else None


def _cell(value: Any) -> str:
    return short(value, 5) if is_number(value) else in_html(str(value))


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
            "" if one.info is None else f"{one.info.nbytes / 1e6:,.1f} MB",
            "" if one.metric is None else in_html(f"{one.metric:.5g}"), in_html(_state(one)),
            "".join(_copied(command) for command in _commands(one, view)),
        )
        for one in reversed(view.checkpoints)
    )  # fmt: skip
    heads = ("checkpoint", "step", "saved", "size", "metric", "state", "commands")
    return f"<h2>Checkpoints</h2>\n{_table(heads, rows)}"


def _state(one: Found) -> str:
    if one.problem is not None:
        return f"damaged: {one.problem}"
    words = ["every byte verified" if one.verified else "committed, all files in their sizes"]
    return ", ".join(words + ["best"] * one.is_best + ["only to resume"] * one.ephemeral)


def _commands(one: Found, view: RunView) -> Iterator[str]:
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
    rows = [
        row
        for row in newest_lines(folder / ANSWERS, _ANSWER_BYTES)
        if isinstance(row, dict) and isinstance(row.get("step"), int) and "prompt" in row
    ]
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
    shown = ", ".join(f"{name} {value:.3g}" for name, value in pairs if is_number(value))
    return _text(_words(row.get("answer", ""))) + (
        f'<div class="more">{in_html(shown)}</div>' if shown else ""
    )


# --- parts ------------------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Any) -> str:
    """A table whose cells are HTML already, and its heads text."""
    head = "".join(f"<th>{in_html(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n'
