"""The page in a real browser: its numbers, its controls, and that it makes no request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser import Tab, address_of, browser, needs_browser
from tests.callbacks.page_runs import append_rows, row, write_run

from windlass.callbacks.page_file import render_page
from windlass.callbacks.report import summarised
from windlass.callbacks.run_view import read_run

ANSWERS = "answers.jsonl"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as found:
        yield found


def shown(tab: Tab, target: Path, *runs: Path) -> None:
    """Write the page of runs, and open it."""
    target.write_text(render_page([summarised(read_run(run)) for run in runs]))
    tab.errors.clear()
    tab.requests.clear()
    tab.open(address_of(target))


def test_the_policy_of_a_file_allows_no_request(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    page = render_page([summarised(read_run(tmp_path))])
    policy = page.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'sha256-" in policy
    assert "@media (prefers-color-scheme: dark)" in page
    assert "connect-src 'self'" in render_page([summarised(read_run(tmp_path))], live="events")


def test_a_cut_line_is_noted_and_the_rest_shown(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"event": "log", "st')
    page = render_page([summarised(read_run(tmp_path))])
    assert "metrics.jsonl, line 5: an unfinished line; it is left out" in page


def test_answers_to_the_same_prompt_are_side_by_side(tmp_path: Path) -> None:
    write_run(tmp_path, 4)
    answers = [
        {"step": step, "set": "prompts", "number": number, "prompt": prompt, "answer": f"<b>{prompt}{step}</b>",
         "reference": None, "scores": {"exact": 0.5}, "tokens": 3}
        for step in (2, 4) for number, prompt in enumerate(("one", "\u0645\u0631\u062d\u0628\u0627"))
    ]  # fmt: skip
    (tmp_path / ANSWERS).write_text("".join(json.dumps(one) + "\n" for one in answers) + '{"step": 5, "pro')
    page = render_page([summarised(read_run(tmp_path))])
    line = next(line for line in page.splitlines() if "one2" in line)
    assert line.index("one2") < line.index("one4")
    assert "&lt;b&gt;one4&lt;/b&gt;" in line
    assert 'dir="auto"' in line
    assert "exact 0.5" in line


def test_samples_have_their_trained_tokens_marked(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    one = {
        "name": "train, row 0",
        "tokens": 9,
        "trained": 2,
        "pieces": [["<user> ", False], ["\u0645<b>", True]],
    }
    (tmp_path / "samples.json").write_text(json.dumps([one, {"name": 3}, [], {**one, "pieces": [["x"]]}]))
    page = render_page([summarised(read_run(tmp_path))])
    assert '<div dir="auto">&lt;user&gt; <mark>\u0645&lt;b&gt;</mark></div>' in page
    assert page.count("2 of 9 tokens trained") == 1
    (tmp_path / "samples.json").write_text("[")
    assert "Samples of the data" not in render_page([summarised(read_run(tmp_path))])


@needs_browser
def test_the_numbers_of_the_charts_are_those_of_the_file(tab: Tab, tmp_path: Path) -> None:
    rows = write_run(tmp_path, 300)
    shown(tab, tmp_path / "page.html", tmp_path)
    data = tab.value("JSON.stringify(windlass.charts().map((one) => [one.title, one.chart.data]))")
    charts = dict(json.loads(data))
    assert charts.keys() == {"loss", "grad_norm", "learning_rate"}
    steps = [one["step"] for one in rows[:-1]]
    assert charts["grad_norm"] == [steps, [one["grad_norm"] for one in rows[:-1]]]
    assert charts["learning_rate"] == [steps, [one["learning_rate"] for one in rows[:-1]]]
    assert charts["loss"][1] == [one["loss"] for one in rows[:-1]]
    assert [value for value in charts["loss"][2] if value is not None] == [0.5]
    assert (
        tab.value("document.querySelectorAll('figcaption')[1].textContent") == "grad_norm (0.0% clipped at 1)"
    )
    assert tab.errors == []
    assert all(url.startswith("file:") for url in tab.requests)


def ranges(tab: Tab) -> set[tuple[float, float]]:
    """What part of the x axis each chart shows."""
    tab.value("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(() => go(1))))")
    found = tab.value("windlass.charts().map((one) => [one.chart.scales.x.min, one.chart.scales.x.max])")
    return {(low, high) for low, high in found}


@needs_browser
def test_zoom_by_mouse_keys_and_the_time_line_moves_every_chart(tab: Tab, tmp_path: Path) -> None:
    write_run(tmp_path, 200)
    append_rows(tmp_path, row(100, skipped_update=100, reason="NaN"))
    shown(tab, tmp_path / "page.html", tmp_path)
    assert ranges(tab) == {(1, 200)}
    tab.press("+")
    assert ranges(tab) == {(50.75, 150.25)}
    tab.press("ArrowRight")
    assert ranges(tab) == {(75.625, 175.125)}
    tab.press("0")
    assert ranges(tab) == {(1, 200)}
    box = tab.value(
        "(({ x, y, width }) => [x, y, width])(document.querySelector('.u-over').getBoundingClientRect())"
    )
    x, y, width = box
    tab.drag((x + width * 0.25, y + 50), (x + width * 0.75, y + 60))
    ((low, high),) = ranges(tab)
    assert (low, high) == (pytest.approx(50.75, abs=2), pytest.approx(150.25, abs=2))
    tab.press("Escape")
    tab.value("document.querySelector('.m-skipped_update').click()")
    ((low, high),) = ranges(tab)
    assert (low + high) / 2 == pytest.approx(100)
    assert tab.errors == []


@needs_browser
def test_metrics_of_one_unit_share_a_chart(tab: Tab, tmp_path: Path) -> None:
    timing = {
        "wall": 1.0,
        "data_seconds": 0.5,
        "compute_seconds": 1.5,
        "peak_memory_process_gib": 2.0,
        "mfu": 0.4,
    }
    append_rows(tmp_path, *({"event": "log", "step": step, "loss": 1.0, "timing": timing} for step in (1, 2)))
    timing = {"wall": 2.0, "eval_runtime": 0.5, "eval_samples_per_second": 9.0}
    append_rows(
        tmp_path, {"event": "evaluate", "step": 2, "eval_loss": 1.0, "eval_f1": 0.5, "timing": timing}
    )
    shown(tab, tmp_path / "page.html", tmp_path)
    titles = tab.value("windlass.charts().map((one) => one.title)")
    assert titles == ["loss", "eval_f1", "mfu", "memory", "seconds between reports", "speed of evaluations"]


@needs_browser
def test_a_metric_without_a_finite_value_is_named(tab: Tab, tmp_path: Path) -> None:
    captions = "[...document.querySelectorAll('figcaption')].map((one) => one.textContent)"
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    append_rows(good, *(row(step, loss=1.0) for step in (1, 2)))
    append_rows(bad, *(row(step, loss="NaN") for step in (1, 2)))
    shown(tab, tmp_path / "page.html", bad)
    assert tab.value(captions) == ["loss (2 non-finite left out)"]
    assert "Nothing has been logged" not in tab.value("document.body.innerText")
    shown(tab, tmp_path / "page.html", good, bad)
    assert tab.value(captions) == ["loss (2 non-finite left out)"]
    assert tab.value("windlass.charts()[0].chart.series.map((one) => one.label)") == ["update", "good: loss"]
    assert tab.errors == []


@needs_browser
def test_axes_smoothing_and_logarithm(tab: Tab, tmp_path: Path) -> None:
    rows = write_run(tmp_path, 50)
    shown(tab, tmp_path / "page.html", tmp_path)
    tab.press("x")
    norm = "windlass.charts()[1].chart.data"
    assert tab.value(f"{norm}[0]") == [one["num_input_tokens_seen"] for one in rows[:-1]]
    tab.press("x")
    assert tab.value(f"{norm}[0]") == [one["step"] for one in rows[:-1]]  # a second each
    tab.value("(smooth.value = '0.5', smooth.dispatchEvent(new Event('input')))")
    raw, smooth = tab.value(f"{norm}.slice(1)")
    assert raw == [one["grad_norm"] for one in rows[:-1]]
    mean = (raw[0] * 0.25 + raw[1] * 0.5) / 0.75
    assert smooth[:2] == [raw[0], pytest.approx(mean)]
    tab.press("l")
    assert tab.value("windlass.charts().map((one) => one.chart.scales.y.distr)") == [3, 1, 3]  # a norm is 0


@needs_browser
@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([2.0, 300.0], ["1", "10", "100", "1,000"]),
        ([1e-35, 1e-3], ["1.000e-35", "1.000e-30", "1.000e-25", "1.000e-20", "1.000e-15", "1.000e-10", "1.000e-5"]),
        ([5e-24, 5e-24], ["1.000e-24", "1.000e-23", "1.000e-22"]),
    ],
)  # fmt: skip
def test_a_logarithmic_axis_has_ticks_for_any_size(
    tab: Tab, tmp_path: Path, values: list[float], ticks: list[str]
) -> None:
    append_rows(tmp_path, *(row(step, rate=value) for step, value in enumerate(values)))
    shown(tab, tmp_path / "page.html", tmp_path)
    tab.press("l")
    tab.value("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(() => go(1))))")
    assert tab.errors == []
    assert tab.value("windlass.charts()[0].chart.axes[1]._values") == ticks


@needs_browser
def test_runs_are_drawn_over_each_other_and_subtracted(tab: Tab, tmp_path: Path) -> None:
    write_run(tmp_path / "first", 60, learning_rate=0.1)
    write_run(tmp_path / "second", 40, 3.0, learning_rate=0.2)
    shown(tab, tmp_path / "page.html", tmp_path / "first", tmp_path / "second")
    labels = tab.value("windlass.charts()[1].chart.series.map((one) => one.label)")
    assert labels == ["update", "first: grad_norm", "second: grad_norm"]
    assert "Differences between the runs" in tab.value("document.body.innerText")
    tab.press("d")
    steps, difference = tab.value("windlass.charts()[0].chart.data.slice(0, 2)")
    assert steps == list(range(1, 41))
    assert difference == [pytest.approx(2 / step**0.5) for step in range(1, 41)]


@needs_browser
def test_a_page_of_hostile_names_runs_nothing(tab: Tab, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=document.title='owned'>"
    append_rows(tmp_path, row(1, **{evil: 1.0}), row(2, **{evil: 2.0, "alert": evil, "message": evil}))
    append_rows(tmp_path, row(3, **{evil: 3.0}))
    shown(tab, tmp_path / "page.html", tmp_path)
    assert tab.value("document.querySelectorAll('img').length") == 0
    assert tab.value("document.title") == tmp_path.name
    assert tab.value("document.querySelector('figcaption').textContent") == evil
