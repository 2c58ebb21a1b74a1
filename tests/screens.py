"""What a person sees of a training: a script, a recipe and a fine-tuning, at terminals of 80 and 150 columns.

    python -m tests.screens

writes them as text into `tests/cli/screens`, for the tests, and two of them as pictures into `docs/images`. In the
text, what depends on the clock and the machine is replaced by signs of the same meaning.
"""

from __future__ import annotations

import html
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tests.terminal import Cell, Terminal

ROOT = Path(__file__).parents[1]
TEXTS = Path(__file__).parent / "cli" / "screens"
PICTURES = ROOT / "docs" / "images"
RECIPE = [
    "training.max_steps=60", "training.logging_steps=10", "training.eval_steps=30", "training.save_steps=30",
    "training.save_in_background=false",
]  # fmt: skip
TUNING = [
    "data.train=sums.jsonl", "tokenizer.train.vocab_size=300", "base.config.hidden_size=64",
    "base.config.intermediate_size=64", "base.config.num_hidden_layers=1", "base.max_steps=50", "base.batch_size=2",
    "base.block_size=32", "training.max_steps=40", "training.logging_steps=5", "training.eval_steps=20",
    "training.save_steps=20", "training.save_in_background=false", "training.output_dir=runs/sums",
    "sample.max_new_tokens=4", "training.per_device_train_batch_size=1",
]  # fmt: skip
# The words that are typed, and text on the screen at which its picture is taken.
SCREENS = {
    "script": (["first.py"], "  90 "),
    "recipe": (["windlass", "train", "lm.yaml", *RECIPE], "  50 "),
    "tuning": (["windlass", "train", "sft-gsm8k", *TUNING], "\n  25  "),
}
COLUMNS = (80, 150)
PICTURED = {("script", 80), ("tuning", 150)}
_COLOURS = {"brightblack": "#5c5c5c", "cyan": "#2aa1b3"}  # of the bar


def furnish(folder: Path) -> None:
    """Write what the commands read into `folder`."""
    from tests.cli.test_train import LM

    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[:1]
    (folder / "first.py").write_text(script)
    (folder / "text.txt").write_text("the cat sat on the mat and the dog did not\n" * 60)
    (folder / "lm.yaml").write_text(LM)
    sums = [{"question": f"{n} plus 1 is", "answer": str(n + 1)} for n in range(200)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))


def shot(name: str, columns: int, folder: Path) -> tuple[str, list[list[Cell]]]:
    """Run the command of a screen; return all that was shown, and the screen at one moment of it."""
    words, moment = SCREENS[name]
    with Terminal(columns=columns, rows=40) as terminal:
        program = folder / words[0] if words[0].endswith(".py") else words[0]
        # The process that is forked for it has a terminal of its own, or none.
        terminal.run(program, *words[1:], cwd=folder, environ={"COLUMNS": str(columns)})
        terminal.until(moment)
        cells = terminal.cells
        assert terminal.end() == 0, terminal.lines
        return "\n".join(terminal.lines), cells


def steady(text: str) -> str:
    """`text` without what depends on the clock, the machine and the model: speeds, times, digits of what was measured,
    what a model wrote, and what is printed after the run.
    """
    text = text.partition("\n\n-----")[0]
    text = re.sub(r"(?m)^\{'eval_loss'.*(\n.+)*", "{'eval_loss'}", text)
    text = re.sub(r"[\d.]+[kM]? (samples|tokens)/s", r"N \1/s", text)
    text = re.sub(r"\b[\d.]+ s\b|\d+:\d\d\b", "TIME", text)
    text = re.sub(r"━+", "━━━", text)
    text = re.sub(r"( *)\d+\.\d+(e[+-]\d\d)?", _without_digits, text)
    # A save ends at any moment after its step.
    saved = sorted(re.findall(r"(?m)^ *saved .*\n", text))
    text = re.sub(r"(?m)^ *saved .*\n", "", text) + "\n" + "".join(saved)
    return re.sub(r"(?m)^(Before training, the model writes:) .*(\n.+)*", r"\1 WORDS", text) + "\n"


def _without_digits(number: re.Match[str]) -> str:
    """The end of a number's column; its digits depend on the value."""
    return "0.0".rjust(len(number[0])) if len(number[1]) > 1 else f"{number[1]}0.0"


def picture(cells: list[list[Cell]], columns: int) -> str:
    """The cells of a screen as SVG, from the last heads of columns on."""
    rows = [list(_runs(row)) for row in cells]
    heads = [number for number, row in enumerate(rows) if row and row[0][2].startswith("step ")]
    rows = rows[heads[-1] :]
    while rows and not rows[-1]:
        rows.pop()
    width, height = 8.4 * columns + 24, 18 * len(rows) + 24
    texts = [
        f'<text x="{12 + 8.4 * column:.1f}" y="{26 + 18 * number}" textLength="{8.4 * len(text):.1f}" '
        f'fill="{_COLOURS.get(colour, "#d0d0d0")}">{html.escape(text)}</text>'
        for number, row in enumerate(rows)
        for column, colour, text in row
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">\n'
        '<rect width="100%" height="100%" rx="6" fill="#1c1c1c"/>\n'
        '<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14" style="white-space:pre">\n'
        + "\n".join(texts)
        + "\n</g>\n</svg>\n"
    )


def _runs(row: list[Cell]) -> Iterator[tuple[int, str, str]]:
    """Stretches of one colour: where they begin, the colour, and the text."""
    column = 0
    for colour, cells in groupby(row, key=lambda cell: cell.colour):
        text = "".join(cell.text for cell in cells)
        if text.strip():
            yield column, colour, text.rstrip()
        column += len(text)


def main() -> None:
    TEXTS.mkdir(exist_ok=True)
    for name in SCREENS:
        for columns in COLUMNS:
            with tempfile.TemporaryDirectory() as place:
                furnish(Path(place))
                text, cells = shot(name, columns, Path(place))
            (TEXTS / f"{name}-{columns}.txt").write_text(steady(text), "utf-8")
            if (name, columns) in PICTURED:
                (PICTURES / f"terminal-{name}.svg").write_text(picture(cells, columns), "utf-8")
            print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
