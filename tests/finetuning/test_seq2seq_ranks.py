"""Text that two ranks generate, replicated and sharded: that of one process, in the order of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.dist.launch import launch
from tests.finetuning.seq2seq_ranks import story

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("seq2seq")
    launch(2, Path(__file__).parent / "seq2seq_ranks.py", folder)
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, "ranks disagree"
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads(json.dumps(story(tmp_path_factory.mktemp("alone"), 4)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_the_same_text_as_one_process(form: str, said: dict[str, Any], alone: dict[str, Any]) -> None:
    found = said[form]
    assert found["sharded"] == (form == "fsdp")
    assert len(found["losses"]) == 2
    assert found["losses"] == pytest.approx(alone["losses"], abs=1e-12)
    for name in ("metrics", "predictions", "labels", "bare"):
        assert found[name] == alone[name], name
    assert len({tuple(row) for row in found["predictions"]}) > 3, "the same text for all shows nothing"
