"""The guides' blocks on checkpoints and the Hub, as printed, read when the test runs; transformers' names are ours."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.hub.server import Hub
from tests.trainer.small import Net, arguments, rows, tokenizer, weights_hash

import windlass
from windlass.core.errors import ConfigError

pytest.importorskip("tokenizers", reason="the guides hand on a tokenizer")

GUIDES = Path(__file__).resolve().parents[3] / "shared" / "guides"
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARTS = ("push_to_hub=True", "trainer = Trainer(\n", "resume_from_checkpoint")
PAGES = [page.read_text("utf-8") for page in sorted(GUIDES.glob("*.txt"))] if GUIDES.is_dir() else []


def blocks(page: str) -> list[str]:
    """The arguments, the Trainer that is made with them and trains, and the calls that resume it; each as printed."""
    found = BLOCK.findall(page)
    return [next((code for code in found if part in code), "") for part in PARTS]


COMPLETE = [page for page in PAGES if all(blocks(page))]
# Two of them differ in nothing but white space.
DIFFERENT = list({"".join("".join(blocks(page)).split()): page for page in COMPLETE}.values())
there = pytest.mark.skipif(not PAGES, reason="the guides are not beside this checkout")


@there
def test_the_blocks_and_the_strategies_are_found() -> None:
    assert (len(COMPLETE), len(DIFFERENT)) == (3, 2)
    assert strategies() == {"checkpoint", "all_checkpoints"}
    assert len(resumed_from()) == 1


@there
@pytest.mark.parametrize("page", DIFFERENT, ids=range(len(DIFFERENT)))
def test_a_model_is_trained_published_and_resumed(
    page: str, hub: Hub, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", token)
    words = tokenizer()
    module = ModuleType("transformers")
    module.__getattr__ = lambda name: getattr(windlass, name)  # type: ignore[method-assign]
    names: dict[str, Any] = {
        "model": Net(),
        "dataset": {"train": rows(8000), "test": rows(16)},
        "tokenizer": words,
        "data_collator": windlass.default_data_collator,
        "compute_metrics": lambda found: {
            "accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())
        },
    }
    given, trained, resumed = blocks(page)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformers", module)
        exec(compile(given, "arguments", "exec"), names)
        header, made = trained.split("\n", 1)
        exec(compile(header, "import", "exec"), names)
    exec(compile(made, "training", "exec"), names)
    run = names["trainer"]
    assert run.state.global_step == 1000
    assert hub.repositories["someone/your-model"].messages[-1] == "Training in progress, step 1000"
    assert {"model.safetensors", "tokenizer.json"} <= hub.files("someone/your-model").keys()
    assert not any("optimizer" in name for name in hub.files("someone/your-model"))
    end = weights_hash(run.model)
    exec(compile(resumed, "resuming", "exec"), names)
    assert weights_hash(run.model) == end


def strategies() -> set[str]:
    """The values of `hub_strategy` in the pages; one of them has a misprint in its name."""
    return {value for page in PAGES for value in re.findall(r'hu[bg]_strategy="(\w+)"', page)}


def resumed_from() -> set[str]:
    """The call that continues what was published, as printed."""
    return {code for page in PAGES for code in re.findall(r"trainer\.train\([^)]*last-checkpoint\"\)", page)}


@there
@pytest.mark.parametrize("strategy", sorted(strategies()))
def test_what_a_strategy_publishes_is_downloaded_and_resumed(
    strategy: str, hub: Hub, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    publishing = {"push_to_hub": True, "hub_token": token, "hub_strategy": strategy, "hub_model_id": "mine"}
    args = arguments(tmp_path / "first", **settings, **publishing)
    windlass.Trainer(Net(), args, train_dataset=rows(64)).train()
    huggingface_hub.snapshot_download("someone/mine", local_dir="output_dir", token=token)
    code = next(iter(resumed_from()))
    if strategy == "all_checkpoints":
        code = code.replace("last-checkpoint", "checkpoint-4")
    runs = [windlass.Trainer(Net(), arguments(Path(folder), max_steps=6, **settings), train_dataset=rows(64))
            for folder in ("output_dir", "whole")]  # fmt: skip
    exec(compile(code, "resuming", "exec"), {"trainer": runs[0]})
    runs[1].train()
    assert runs[0].state.global_step == 6
    assert weights_hash(runs[0].model) == weights_hash(runs[1].model)


def test_the_misprint_of_one_guide_is_corrected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'hub_strategy'"):
        windlass.TrainingArguments(str(tmp_path), hug_strategy="all_checkpoints")
