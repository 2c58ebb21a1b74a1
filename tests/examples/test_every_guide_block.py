"""Every block of the guides, as printed, read when the test runs: here, in a test that is named, or a reason why not.

What is undone before a block runs: indentation that two pages have lost, words of code that were translated, and the
`...` that replaces whatever a reader has.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from tests.trainer.small import arguments, bert, llama, text_rows, token_rows, tokenizer, weights_hash

import windlass

for package in ("transformers", "datasets", "tqdm"):
    pytest.importorskip(package)

TESTS = Path(__file__).resolve().parents[1]
GUIDES = Path(__file__).resolve().parents[3] / "shared" / "guides"
FENCED = re.compile(r"^[ \t]*```(\S*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    page: int
    number: int
    text: str


def blocks() -> list[Block]:
    pages = [page.read_text("utf-8") for page in sorted(GUIDES.glob("*.txt"))] if GUIDES.is_dir() else []
    return [
        Block(page, number, text)
        for page, whole in enumerate(pages)
        for number, (_, text) in enumerate(FENCED.findall(whole))
    ]


BLOCKS = blocks()
pytestmark = pytest.mark.skipif(not BLOCKS, reason="the guides are not beside this checkout")

# --- where each kind of block runs ------------------------------------------------------------------------------------

OF_THE_SYSTEM = "changes or shows the system: another package, the CUDA toolkit, variables of a shell"
# A part of the text -> the test that runs such blocks, or why none does. The first one that is found counts.
ELSEWHERE = {
    r"^pip install|^which nvcc|^/usr/local/cuda|^echo \$PATH|^sudo ln|^export (CUDA_DEVICE|PATH)": OF_THE_SYSTEM,
    r"^export CUDA_VISIBLE_DEVICES=\S+\n*\Z": OF_THE_SYSTEM,
    r"galore|lomo": "optim/test_guides.py::test_the_snippet_trains",
    r"run_glue\.py": "examples/test_guide_commands.py::test_as_printed",
    r"distributed_type: MULTI_GPU": "cli/launching/test_two_machines.py::"
    "test_the_file_that_guides_print_starts_two_machines_with_a_token_or_without",
    r"distributed_type: FSDP": "recipes/test_from_files.py::test_the_guides_files_as_printed",
    r"deepspeed_config": "zero/test_started_by.py::test_the_guides_files_as_printed",
    r"^deepspeed --num_gpus": "zero/test_started_by.py::test_deepspeeds_own_launcher",
    r"^accelerate config$": "cli/test_config_command.py::test_choices_on_a_terminal_by_word_and_by_number",
    r"push_to_hub=True|resume_from_checkpoint": "hub/test_guide_blocks.py::"
    "test_a_model_is_trained_published_and_resumed",
    r"^trainer = Trainer\((?!.*EarlyStopping).*trainer\.train": "hub/test_guide_blocks.py::"
    "test_a_model_is_trained_published_and_resumed",
}


def elsewhere(block: Block) -> str | None:
    text = block.text.strip()
    flags = re.MULTILINE | re.DOTALL
    return next((where for part, where in ELSEWHERE.items() if re.search(part, text, flags)), None)


def test_every_block_runs_or_has_a_reason() -> None:
    nowhere = [block for block in BLOCKS if not elsewhere(block) and not runner(block)]
    assert len(BLOCKS) == 84
    assert not nowhere


def test_the_tests_that_are_named_are_there() -> None:
    used = {elsewhere(block) for block in BLOCKS}
    assert used - {None} == set(ELSEWHERE.values())
    for where in used - {None, OF_THE_SYSTEM}:
        file, _, name = str(where).partition("::")
        assert f"def {name}(" in (TESTS / file).read_text("utf-8"), where


# --- blocks of Python -------------------------------------------------------------------------------------------------

TRANSLATED = {
    "من المحولات استيراد TrainingArguments، المدرب": "from transformers import TrainingArguments, Trainer",
    "المدرب = مدرب": "trainer = Trainer",
}


def restored(text: str) -> str:
    """A block with its indentation, its words and its ellipses as Python needs them."""
    for word, english in TRANSLATED.items():
        text = text.replace(word, english)
    text = text.replace("from transformers import", "from ours import")
    text = text.replace("from accelerate import", "from windlass import")
    text = re.sub(r"TrainingArguments ?\(\.\.\.", "TrainingArguments('out', **asked", text)
    text = re.sub(r"Trainer ?\(\.\.\.", "Trainer(**given", text)
    try:
        compile(text, "guide", "exec")
    except IndentationError:
        text = indented(text)
    return text


def indented(text: str) -> str:
    """For the two classes of the pages: methods of a class, bodies of methods, and branches."""
    lines, method = [], False
    for line in text.splitlines():
        if line.startswith(("class ", "from ", "import ")):
            deep, method = 0, False
        elif line.startswith("def "):
            deep, method = 1, True
        elif lines and re.match(r"\s*(if|else)\b.*:$", lines[-1]):
            deep = 3
        else:
            deep = 2 if method else 0
        lines.append("    " * deep + line)
    return "\n".join(lines)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader of the guides has, with Windlass's names in the place of the libraries'."""
    import transformers

    monkeypatch.chdir(tmp_path)
    ours = ModuleType("ours")
    ours.__dict__["AdamW"] = torch.optim.AdamW  # transformers had one until its version 5
    ours.__getattr__ = lambda name: getattr(  # type: ignore[method-assign]
        windlass if name in windlass.__all__ else transformers, name
    )
    monkeypatch.setitem(sys.modules, "ours", ours)
    few = {"max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    return {"__name__": "guide", "torch": torch, "logging": logging, "sys": sys, "asked": few}


def run(block: Block, names: dict[str, Any]) -> None:
    exec(compile(restored(block.text), f"guide {block.page}, block {block.number}", "exec"), names)


def weighted_loss(block: Block, names: dict[str, Any]) -> None:
    run(block, names)
    data, model = token_rows(8, labels=3), bert(3)
    batch = {name: torch.tensor([row[name] for row in data]) for name in data[0]}
    labels = batch.pop("labels")
    expected = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))(model(**batch).logits, labels)
    args = arguments(Path("out"), max_steps=1, per_device_eval_batch_size=8)
    trainer = names["CustomTrainer"](model=model, args=args, train_dataset=data, eval_dataset=data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    before = weights_hash(model)
    trainer.train()
    assert weights_hash(model) != before


def stops_after_ten(block: Block, names: dict[str, Any]) -> None:
    """The callback, and the Trainer that the page makes with it."""
    page = [other for other in BLOCKS if other.page == block.page and "EarlyStoppingCallback" in other.text]
    defined, made = page
    run(defined, names)
    names |= {
        "model": bert(),
        "training_args": arguments(Path("out"), max_steps=20, save_strategy="no"),
        "dataset": {"train": token_rows(16), "test": token_rows(4)},
        "tokenizer": tokenizer(),
        "data_collator": windlass.default_data_collator,
        "compute_metrics": None,
    }
    run(made, names)
    names["trainer"].train()
    assert names["trainer"].state.global_step == 10


def levels_of_loggers(block: Block, names: dict[str, Any]) -> None:
    import datasets
    import transformers

    names |= {"datasets": datasets, "transformers": transformers, "given": given()}
    names |= {"training_args": arguments(Path("out"), log_level="error"), "Trainer": windlass.Trainer}
    before = datasets.utils.logging.get_verbosity()
    # The page prints a list of what it leaves out.
    try:
        run(block._replace(text=block.text.replace("[...]", "")), names)
        assert names["logger"].level == logging.ERROR
        assert datasets.utils.logging.get_verbosity() == logging.ERROR
    finally:
        datasets.utils.logging.set_verbosity(before)
    assert names["trainer"].train().global_step == 2


def given() -> dict[str, Any]:
    return {
        "model": llama(),
        "train_dataset": text_rows(8),
        "args": arguments(Path("out"), max_steps=2, save_strategy="no"),
    }


def noise_on_embeddings(block: Block, names: dict[str, Any]) -> None:
    losses = []
    for alpha in ("0.1", "0"):
        parts = given()
        del parts["args"]
        names["given"] = parts
        torch.manual_seed(0)
        run(
            block._replace(text=re.sub(r"(neftune_noise_alpha ?= ?)0\.1", rf"\g<1>{alpha}", block.text)),
            names,
        )
        trainer = names["trainer"]
        assert trainer.args.neftune_noise_alpha == float(alpha)
        losses.append(trainer.train().training_loss)
    assert losses[0] != losses[1]


def loop(block: Block, names: dict[str, Any]) -> None:
    """The three blocks of the page one after another, or what its comparison of two scripts leaves."""
    import tqdm
    from torch.utils.data import DataLoader

    bert().save_pretrained("checkpoint")
    rows = [{name: torch.tensor(value) for name, value in row.items()} for row in token_rows(8)]
    names |= {"checkpoint": "checkpoint", "tqdm": tqdm.tqdm, "num_epochs": 3}
    names |= {name: DataLoader(rows, batch_size=4) for name in ("train_dataloader", "eval_dataloader")}
    if ">>>" in block.text:
        names["model"] = bert()
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=3e-5)
        names["lr_scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
        names["progress_bar"] = tqdm.tqdm(range(6))
        parts = [
            other for other in BLOCKS if other.page == block.page and "accelerator" in other.text.lower()
        ]
        texts = [
            "".join(re.findall(r"^(?:>>>|\.\.\.) (.*\n)", part.text, re.MULTILINE)) for part in parts[:3]
        ]
    else:
        kept = [line[2:] for line in block.text.splitlines() if not line.startswith("-")]
        texts = ["\n".join(kept)]
    for text in texts:
        run(block._replace(text=text), names)
    assert names["progress_bar"].n == 6
    assert isinstance(names["accelerator"], windlass.Accelerator)
    before = weights_hash(bert())
    assert weights_hash(names["accelerator"].unwrap_model(names["model"])) != before


def started_from_a_notebook(block: Block, names: dict[str, Any]) -> None:
    called: list[int] = []
    names["training_function"] = lambda: called.append(windlass.Accelerator(cpu=True).num_processes)
    run(block._replace(text=block.text.replace(">>> ", "")), names)
    assert called == [1]


# --- commands ---------------------------------------------------------------------------------------------------------

SCRIPT = """\
import logging, os
from windlass import HfArgumentParser, Trainer, TrainingArguments
from tests.trainer.small import Net, rows

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
level = args.get_process_log_level()
trainer = Trainer(Net(), args, train_dataset=rows(16))
trainer.train()
rank, steps = os.environ.get("RANK", 0), trainer.state.global_step
print(f"rank {rank} of {args.world_size}: {steps} steps at {level}", flush=True)
"""


def command(block: Block, names: dict[str, Any]) -> None:
    """The lines, by a shell in which `accelerate` is `windlass`, and the script is on the path."""
    place = Path("bin").absolute()
    place.mkdir()
    (place / "accelerate").symlink_to(Path(sys.executable).with_name("windlass"))
    for name in ("train.py", "trainer-program.py", "my_app.py"):
        script = Path("bin" if name == "my_app.py" else ".", name)
        script.write_text(f"#!{sys.executable}\n{SCRIPT}")
        script.chmod(0o755)
    flags = "--output_dir out --max_steps 2 --use_cpu --save_strategy no --disable_tqdm True"
    lines = [line for line in block.text.strip().splitlines() if not line.startswith("#")]
    text = re.sub(r"(?<=\.py)( \.\.\.)?", f" {flags}", "\n".join(lines))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CUDA_")},
        "PATH": f"{place}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS.parent}",
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        ["bash", "-ec", text], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"rank (\d+) of (\d+): 2 steps at (\d+)", done.stdout)
    processes = 2 if re.search(r"(num_processes|nproc_per_node)[ =]2", text) else 1
    wanted = []
    for level in [re.findall(r"--log_level (\w+)", line) for line in text.splitlines() if ".py" in line]:
        first = logging.getLevelNamesMapping()[level[0].upper() if level else "WARNING"]
        levels = [first, logging.WARNING]  # of the main process, and of the other one
        wanted += [(str(rank), str(processes), str(levels[rank])) for rank in range(processes)]
    assert sorted(found) == sorted(wanted), done.stdout


# --- which of them ----------------------------------------------------------------------------------------------------

RUNNERS: dict[str, Callable[[Block, dict[str, Any]], None]] = {
    r"class CustomTrainer": weighted_loss,
    r"EarlyStoppingCallback": stops_after_ten,
    r"get_process_log_level": levels_of_loggers,
    r"neftune_noise_alpha": noise_on_embeddings,
    r"notebook_launcher": started_from_a_notebook,
    r"^accelerate launch|^my_app\.py|trainer-program\.py": command,
    r"[aA]ccelerator": loop,
}


def runner(block: Block) -> Callable[[Block, dict[str, Any]], None] | None:
    return next((run for part, run in RUNNERS.items() if re.search(part, block.text, re.MULTILINE)), None)


def here() -> list[Any]:
    """The blocks of this file, once each; of commands some are slow."""
    seen, found = set[str](), list[Any]()
    for block in BLOCKS:
        works = None if elsewhere(block) else runner(block)
        same = "".join(block.text.split())
        if works is None or same in seen:
            continue
        seen.add(same)
        short = (
            works is not command or "--num_processes 2" in block.text or "--nproc_per_node=2" in block.text
        )
        marks = () if short else (pytest.mark.slow,)
        found.append(pytest.param(block, marks=marks, id=f"{works.__name__} {block.page}-{block.number}"))
    return found


@pytest.mark.parametrize("block", here())
@pytest.mark.filterwarnings("ignore")
def test_as_printed(block: Block, names: dict[str, Any]) -> None:
    works = runner(block)
    assert works is not None
    works(block, names)
