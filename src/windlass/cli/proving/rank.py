"""What each process of a trial does: train the small model on its place in the layout, and write everything down."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from windlass.checkpoint.adapters import peft_library
from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import write_tensors
from windlass.cli.proving.double import double_precision
from windlass.cli.proving.trial import ACCUMULATION, OUTPUT, REPORT, ROWS, UPDATES, VALUES, Trial
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import TrainerCallback
from windlass.core.errors import ConfigError, ModelError
from windlass.core.events import TrainerControl, TrainerState
from windlass.core.optional import require
from windlass.dist.gang import leave
from windlass.dist.sharded import whole
from windlass.trainer.trainer import Trainer

# What a launcher or a user has set for other jobs.
_FOREIGN = (
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "TORCHELASTIC_",
    "WINDLASS_PARALLEL",
    "GROUP_",
    "ROLE_",
)
_LOGGED = (
    "loss", "grad_norm", "num_input_tokens_seen", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss",
)  # fmt: skip
_SHORTEST, _LONGEST = 3, 15


def run_rank(trial: Trial, rank: int, port: int, folder: str) -> None:
    """Carry out the part of one process. It writes what it printed, `REPORT`, and `VALUES`, and exits with 1 if the
    training failed; a layout that is refused is in the report.
    """
    place = Path(folder)
    _redirect(place / OUTPUT.format(rank))
    torch.set_num_threads(1)
    _enter(rank, trial.layout.processes, port)
    report: dict[str, Any] = {}
    code = 0
    try:
        with double_precision():
            noted = _train(trial, place, rank)
        report.update(reported=noted.reported, order=list(noted.tensors))
    except (ConfigError, ModelError) as error:
        report["refused"] = str(error)
    except BaseException as error:
        traceback.print_exc()
        report["failed"], code = f"{type(error).__name__}: {error}", 1
    (place / REPORT.format(rank)).write_text(json.dumps(report), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        with contextlib.suppress(Exception):
            leave()
    os._exit(code)  # nothing is left to be done, and other ranks may never answer


def _redirect(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _enter(rank: int, world: int, port: int) -> None:
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")


# --- the training -----------------------------------------------------------------------------------------------------


def _train(trial: Trial, folder: Path, rank: int) -> _Noted:
    """Train and evaluate, and write gradients and weights."""
    noted = _Noted(trial.training.get("max_grad_norm") or 0.0)
    trainer = _trainer(trial, folder, noted)
    trainer.train()
    trainer.evaluate()
    write_tensors(folder / VALUES.format(rank), noted.tensors, files=Files())
    return noted


def _trainer(trial: Trial, folder: Path, noted: TrainerCallback) -> Any:
    rows = _rows(trial)
    given: dict[str, Any] = {
        "model": _model(trial.config), "train_dataset": rows, "eval_dataset": rows[: 2 * trial.batches - 1],
        "callbacks": [noted],
    }  # fmt: skip
    if not trial.tuning:
        return Trainer(args=TrainingArguments(**_arguments(trial, folder)), data_collator=_collate, **given)
    from windlass.finetuning.sft_config import SFTConfig
    from windlass.finetuning.sft_trainer import SFTTrainer

    args = SFTConfig(**_arguments(trial, folder), bf16=False, dataset_kwargs={"skip_prepare_dataset": True})
    adapter = None
    if trial.adapter:
        peft = peft_library("prove the training of an adapter")
        adapter = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return SFTTrainer(
        args=args, processing_class=_tokenizer(trial.config["vocab_size"]), peft_config=adapter, **given
    )


def _tokenizer(vocabulary: int) -> Any:
    """A word for each id; texts are never read."""
    tokenizers: Any = require("tokenizers", "prove a fine-tuning")
    words = {f"w{number}": number for number in range(vocabulary)}
    kind: Any = transformers.PreTrainedTokenizerFast
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    return kind(tokenizer_object=inner, pad_token="w0", bos_token="w1", eos_token="w2")


def _model(config: dict[str, Any]) -> Any:
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    made = kind.from_dict({**config, "use_cache": False})
    # Weights so large that attention and experts choose, as those of a trained model do.
    for name in ("initializer_range", "init_std"):
        if hasattr(made, name):
            setattr(made, name, 0.2)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(made, experts_implementation="eager")
    with torch.no_grad():  # biases and norms differ from 0 and 1, so that their place matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.to(torch.float64)


def _arguments(trial: Trial, folder: Path) -> dict[str, Any]:
    layout = trial.layout
    sizes = {f"{axis}_size": size for axis, size in layout.sizes if axis != "dp"}
    if layout.along("dp") > 1:
        sizes["dp_replicate_size"] = layout.along("dp")
    return {
        "output_dir": str(folder / "run"), "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS, "gradient_accumulation_steps": trial.batches // layout.data_ranks,
        "max_steps": UPDATES, "learning_rate": 0.02, "weight_decay": 0.1, "adam_epsilon": 1e-6,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "log_level": "error",
        "save_strategy": "no", "train_sampling_strategy": "sequential", "include_num_input_tokens_seen": "non_padding",
        "parallelism_config": sizes or None, **trial.training,
    }  # fmt: skip


class _Noted(TrainerCallback):
    """Whole gradients and weights of each update, and what is logged.

    Attributes:
        tensors: `gradient/UPDATE/NAME`, as it was before clipping; `weight/UPDATE/NAME`.
        reported: the figures of each report.

    Args:
        max_norm: to which gradients are clipped; 0 if they are not.
    """

    def __init__(self, max_norm: float) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.reported: list[dict[str, float]] = []
        self._max_norm, self._clipped = max_norm, dict[str, Tensor]()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._clipped[name] = parameter.grad.detach().clone()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        for name, value in model.state_dict().items():
            self._keep(f"weight/{state.global_step}/{name}", value)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        found = {name: float(kwargs["logs"][name]) for name in _LOGGED if name in kwargs["logs"]}
        if "grad_norm" in found:
            self._undo_clipping(state.global_step, found["grad_norm"])
        if found:
            self.reported.append(found)

    def _undo_clipping(self, update: int, norm: float) -> None:
        """By the norm that this rank clipped its part with, so that a wrong norm does not look like wrong gradients."""
        factor = (norm + 1e-6) / self._max_norm if self._max_norm and norm + 1e-6 > self._max_norm else 1.0
        for name, gradient in self._clipped.items():
            self._keep(f"gradient/{update}/{name}", gradient * factor)
        self._clipped = {}

    def _keep(self, name: str, value: Tensor) -> None:
        self.tensors[name] = whole(value.detach()).clone()


# --- the data ---------------------------------------------------------------------------------------------------------


def _rows(trial: Trial) -> list[dict[str, list[int]]]:
    """Ragged rows with ignored targets. Those of one micro-batch of the first update, and of the first one of all ranks
    in the second, have nothing else.
    """
    generator = torch.Generator().manual_seed(1)
    vocabulary = trial.config["vocab_size"]
    found = []
    ranks = trial.batches // ACCUMULATION  # of the largest layout that is compared
    for index in range(UPDATES * trial.batches * ROWS):
        batch = index // ROWS
        length = int(torch.randint(_SHORTEST, _LONGEST, (), generator=generator))
        ids = torch.randint(min(3, vocabulary - 1), vocabulary, (length,), generator=generator).tolist()
        without = batch == 1 or trial.batches <= batch < trial.batches + ranks
        ignored = length if without else length // 3
        found.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return found


def _collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        length = len(row["input_ids"])
        missing = width - length
        batch["input_ids"].append([*row["input_ids"], *[0] * missing])
        batch["labels"].append([*row["labels"], *[-100] * missing])
        batch["attention_mask"].append([*[1] * length, *[0] * missing])
    return {name: torch.tensor(values) for name, values in batch.items()}
