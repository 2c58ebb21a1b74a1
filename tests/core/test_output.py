from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from pathlib import Path

import pytest

from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.core.output import TolerantStream, escaped, in_html, one_line, say, say_json, shown

EVIL = "\x1b]0;owned\x07\x1b[31mname\u202eexe.\u2066x\x9b\rgone\x00\u200b"


def test_control_characters_and_marks_of_direction_are_written_out() -> None:
    assert escaped(EVIL) == ("\\x1b]0;owned\\x07\\x1b[31mname\\u202eexe.\\u2066x\\x9b\\rgone\\x00\\u200b")
    assert escaped("two\nlines\tof Überschrift 学習 🙂") == "two\nlines\tof Überschrift 学習 🙂"
    assert one_line("a\nb") == "a\\nb"
    assert in_html("<b>\x1b[0m") == "&lt;b&gt;\\x1b[0m"


def test_messages_logs_and_errors_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    get_logger("windlass.test").warning("a name: %s of s3://u:%s@b/r", EVIL, "secret/word")
    try:
        raise ValueError(f"{EVIL} hub_token='abc'")
    except ValueError:
        get_logger("windlass.test").warning("failed", exc_info=True)
    say(CheckpointError(EVIL), error=True)
    out, err = capsys.readouterr()
    for letter in "\x1b\x07\x9b\r\u202e\u2066\x00\u200b":
        assert letter not in out + err
    assert "secret/word" not in err
    assert "'abc'" not in err
    assert "Traceback" in err


def test_facts_for_programs_are_json_without_secrets_and_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = {
        "hub_token": "abc",
        "path": Path("a/\u202eb"),
        "sizes": (1, 2.5, math.inf, None, True),
        "url": "s3://user:word@bucket",
    }
    say_json(facts)
    printed = capsys.readouterr().out
    assert json.loads(printed) == {
        "hub_token": "***",
        "path": "a/\u202eb",
        "sizes": [1, 2.5, None, None, True],
        "url": "s3://***@bucket",
    }
    assert printed.isascii()


def test_a_problem_shows_no_secret() -> None:
    error = ConfigError(
        [Problem("training.hub_token", "topsecret", "x"), Problem("output_dir", "s3://a:b@c/d", "y")]
    )
    assert "topsecret" not in str(error)
    assert "a:b" not in str(error)
    assert "training.hub_token='***': x" in str(error)


def test_handlers_of_a_script_get_clean_records_too() -> None:
    logger, taken = get_logger("windlass.test"), io.StringIO()
    handler = logging.StreamHandler(taken)
    logger.addHandler(handler)
    try:
        logger.warning("%s", "s3://u:p@b")
    finally:
        logger.removeHandler(handler)
    assert taken.getvalue() == "s3://***@b\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    full = open("/dev/full", "w", encoding="ascii", buffering=1)  # noqa: SIM115
    with pytest.raises(OSError, match="No space"):
        full.write("x\n")
    stream = TolerantStream(full)
    assert stream.write("text\n") == 5
    stream.flush()
    with open(os.devnull, "w", encoding="ascii") as nowhere:
        os.dup2(nowhere.fileno(), full.fileno())
    full.close()
    assert not stream.isatty()


def test_letters_that_an_encoding_lacks_are_written_out() -> None:
    raw = io.BytesIO()
    stream = TolerantStream(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    stream.write("Verlust 0.5 学 ✓\n")
    assert raw.getvalue() == b"Verlust 0.5 \\u5b66 \\u2713\n"


def test_a_closed_stream_and_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    say("x")
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    say("x")
    say("x", error=True)
    logging.getLogger("windlass.test").warning("x")
    assert shown(5) == "5"
