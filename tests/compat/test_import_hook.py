"""Imports answered for scripts that are run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.zero.needed import needs_deepspeed

from windlass.compat.import_hook import STARTUP, VARIABLE, environment

TRAINS = """
import torch
from torch import nn
from transformers import AutoConfig, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
import transformers
import transformers.modeling_utils as internal

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
    def forward(self, x, labels):
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

from transformers import DefaultFlowCallback, trainer as module
class Shorter(DefaultFlowCallback):
    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == 2:
            control.should_save = control.should_training_stop = True
module.DEFAULT_CALLBACKS = [Shorter]
module.PrinterCallback = Shorter

rows = [{"x": torch.full((4,), float(i)), "labels": i % 2} for i in range(8)]
args = TrainingArguments("out", max_steps=3, disable_tqdm=True, report_to="none", dataloader_num_workers=1)
trainer = Trainer(Net(), args, train_dataset=rows)
trainer.train()
print("engine", Trainer.__module__, transformers.Trainer is Trainer)
print("models", AutoConfig.__module__.partition(".")[0], internal.__name__)
print("checkpoint", get_last_checkpoint("out"))
"""
GENERATES = """
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
from transformers import T5ForConditionalGeneration
from transformers.trainer_seq2seq import Seq2SeqTrainer as again

class Tokenizer:
    padding_side, pad_token_id = "right", 0
    def pad(self, rows, **options):
        import torch
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

config = T5Config(vocab_size=12, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
rows = [{"input_ids": [i + 2, 3, 4], "labels": [i + 2, 1]} for i in range(4)]
args = Seq2SeqTrainingArguments(
    "out", max_steps=1, predict_with_generate=True, generation_max_length=5, report_to="none", disable_tqdm=True
)
trainer = Seq2SeqTrainer(
    T5ForConditionalGeneration(config), args, DataCollatorForSeq2Seq(Tokenizer()), rows, rows,
    compute_metrics=lambda p: {"width": p.predictions.shape[1]},
)
trainer.train()
print("engine", Seq2SeqTrainer.__module__, type(args).__module__, again is Seq2SeqTrainer)
print("width", trainer.evaluate()["eval_width"])
"""
LOOPS = """
import sys
import torch
import accelerate
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model = accelerator.prepare(model)
print("engine", type(accelerator).__module__, accelerate.Accelerator is Accelerator)
print("version", accelerate.__version__ == __import__("importlib.metadata").metadata.version("accelerate"))
from accelerate.utils.dataclasses import DistributedType, ProjectConfiguration
from accelerate.utils.operations import gather
configured = Accelerator(cpu=True, project_config=ProjectConfiguration("x"))
print("submodules", configured.project_dir, DistributedType.__module__, gather(torch.ones(1)).tolist())
print("internal", sys.modules["accelerate"].library().Accelerator.__module__)
from accelerate.utils import tqdm
import accelerate.utils.tqdm
print("a function and a submodule", list(tqdm(range(2), disable=True)), list(accelerate.utils.tqdm([1])))
del DistributedType
from accelerate.utils import *
print("star", DistributedType.__module__, "WEIGHTS_INDEX_NAME" in globals())
"""


def run(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "windlass", "run", *(words or ("script.py",))]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_script_that_generates_runs_on_this_engine(tmp_path: Path) -> None:
    ended = run(tmp_path, GENERATES)
    assert ended.returncode == 0, ended.stderr
    assert (
        "engine windlass.finetuning.seq2seq_trainer windlass.finetuning.seq2seq_arguments True"
        in ended.stdout
    )
    assert "width 5" in ended.stdout


@pytest.mark.slow
def test_trackers_callbacks_are_removed_by_their_class(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    script = """
import torch
from transformers import Trainer, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import WandbCallback
trainer = Trainer(torch.nn.Linear(1, 1), TrainingArguments("out", report_to="tensorboard", use_cpu=True))
print("removed", trainer.pop_callback(TensorBoardCallback) is not None, WandbCallback.__module__)
"""
    ended = run(tmp_path, script)
    assert ended.returncode == 0, ended.stderr
    assert "removed True windlass.compat.tracker_callbacks" in ended.stdout


@pytest.mark.slow
@needs_deepspeed
def test_deepspeed_gets_its_settings_before_a_script_starts_it(tmp_path: Path) -> None:
    script = """
from transformers.integrations import HfDeepSpeedConfig as first
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
import deepspeed
print("divided", first is HfDeepSpeedConfig, is_deepspeed_zero3_enabled(), type(kept).__module__)
print("compiled", deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"])
"""
    ended = run(tmp_path, script)
    assert ended.returncode == 0, ended.stderr
    assert "divided True True transformers.integrations.deepspeed" in ended.stdout
    assert "compiled False" in ended.stdout


def test_a_trainers_script_runs_on_this_engine(tmp_path: Path) -> None:
    ended = run(tmp_path, TRAINS)
    assert ended.returncode == 0, ended.stderr
    assert "engine windlass.trainer.trainer True" in ended.stdout
    assert "models transformers transformers.modeling_utils" in ended.stdout
    assert "checkpoint out/checkpoint-2" in ended.stdout
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("windlass answered")]
    assert "transformers.Trainer" in line
    assert "transformers.get_last_checkpoint" in line
    assert line.endswith("; assigned, and not read by runs: transformers.trainer.PrinterCallback")


def test_a_loop_runs_on_this_engine_and_the_library_stays_whole(tmp_path: Path) -> None:
    ended = run(tmp_path, LOOPS)
    assert ended.returncode == 0, ended.stderr
    assert "engine windlass.accelerator.accelerator True" in ended.stdout
    assert "version True" in ended.stdout
    assert "submodules x windlass.config.enums [1.0]" in ended.stdout
    assert "internal accelerate.accelerator" in ended.stdout
    assert "a function and a submodule [0, 1] [1]" in ended.stdout
    # A name that Windlass refuses with a reason is not among those of a star.
    assert "star windlass.config.enums False" in ended.stdout


def test_a_library_that_failed_to_import_fails_again_with_the_same_reason(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("first = 1\nimport package_that_is_missing\n")
    script = """
import importlib
import sys

sys.path.insert(0, ".")
for _ in range(2):
    try:
        importlib.import_module("accelerate")
    except ImportError as error:
        print("no", error)
loader = importlib.util.find_spec("accelerate").loader
module = loader.create_module(importlib.util.find_spec("accelerate"))
for _ in range(2):
    try:
        module.second
    except ImportError as error:
        print("no", error)
"""
    ended = run(tmp_path, script)
    assert ended.stdout.count("no No module named 'package_that_is_missing'") == 4, (
        ended.stdout + ended.stderr
    )


@pytest.mark.slow
def test_what_is_not_built_is_left_to_the_library_and_named(tmp_path: Path) -> None:
    script = "from transformers.trainer_utils import TrainerMemoryTracker, RemoveColumnsCollator\n"
    script += "from transformers.trainer_pt_utils import LayerWiseDummyOptimizer\n"
    ended = run(tmp_path, script)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().splitlines()[-1].startswith("windlass answered")
    assert "ImportError: windlass.trainer_pt_utils has no LayerWiseDummyOptimizer" in ended.stderr


def test_the_error_of_a_script_has_its_own_frames_on_top(tmp_path: Path) -> None:
    ended = run(tmp_path, "import accelerate\n\ndef fails():\n    raise KeyError('mine')\n\nfails()\n")
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].strip().startswith(f'File "{tmp_path / "script.py"}", line 6') or "script.py" in lines[1]
    assert "KeyError: 'mine'" in lines


@pytest.mark.parametrize("words", [("absent.py",), ("",)])
def test_a_script_that_does_not_exist(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = run(tmp_path, "", *words)
    assert ended.returncode == 2
    assert "there is no such file" in ended.stderr


def test_arguments_and_modules_reach_the_script(tmp_path: Path) -> None:
    script = "import sys\nprint(__name__, sys.argv[1:])\n"
    assert "__main__ ['--x', '-m']" in run(tmp_path, script, "script.py", "--x", "-m").stdout
    assert "__main__ ['3']" in run(tmp_path, script, "-m", "script", "3").stdout


def test_the_sitecustomize_of_the_installation_still_runs_and_an_error_of_it_leaves_the_answers(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\nimport absent_module\n")
    (tmp_path / "script.py").write_text("import accelerate\nprint(accelerate.Accelerator.__module__)\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environ |= environment(environ)
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert ended.stdout.split() == ["theirs", "windlass.accelerator.accelerator"], ended.stderr
    assert "No module named 'absent_module'" in ended.stderr


def test_the_environment_is_extended_once() -> None:
    first = environment({"PYTHONPATH": f"mine{os.pathsep}yours"})
    assert first == {VARIABLE: "1", "PYTHONPATH": os.pathsep.join([str(STARTUP), "mine", "yours"])}
    assert environment(first) == first
