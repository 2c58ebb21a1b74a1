"""What each process of a trial does: train the small model on its place in the layout, and write everything down."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.adapters import peft_library
from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import write_tensors
from windlass.cli.proving.small_training import (
    ACCUMULATION,
    FIGURES,
    MAX_NORM,
    OUTPUT,
    REPORT,
    ROWS,
    UPDATES,
    VALUES,
    SmallTraining,
)
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.attributes import attributes_of
from windlass.core.errors import ConfigError, ModelError
from windlass.core.events import TrainerState
from windlass.core.optional import require
from windlass.core.world import World
from windlass.data.collate_causal import DataCollatorForCausalLM
from windlass.dist.gang import leave
from windlass.dist.sharded import Absent, whole
from windlass.recipes.schema import TokenizerTraining
from windlass.recipes.tokenizing import WRITER, train_tokenizer
from windlass.trainer.trainer import Trainer

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_TO_ONE_DTYPE = ("float", "half", "bfloat16")
_WITH_DTYPE = ("to", "type", "softmax", "log_softmax", "sum", "mean", "cumsum")


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Within it, a float64 tensor is not rounded to fewer bits: norms, softmax and losses of models cast to float32.
    Whole numbers become float64 where a model has them as floats: it may multiply positions by a matrix in float64. So
    do zeros to which it adds: the balancing loss of experts counts tokens in float32.

    Two layouts add in different orders. In float64 that differs by 1e-16, and a fault by far more; after a cast to
    float32 the two could not be told apart. Methods are replaced, since a mode of PyTorch is off in the backward, where
    layers are computed again.
    """
    of_tensors, of_torch = (
        {
            name: _wide(getattr(owner, name), name in _TO_ONE_DTYPE)
            for name in (*_TO_ONE_DTYPE, *_WITH_DTYPE)
            if callable(getattr(owner, name, None))
        }
        for owner in (Tensor, torch)
    )
    of_torch["zeros"] = _wide_options(torch.zeros)
    with attributes_of(Tensor, **of_tensors), attributes_of(torch, **of_torch):
        yield


def _wide(real: Callable[..., Any], always: bool) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        if not args or not isinstance(args[0], Tensor) or args[0].dtype not in (torch.float64, torch.int64):
            return real(*args, **options)
        return args[0].double() if always else wide(*args, **options)

    wide = _wide_options(real)
    return call


def _wide_options(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
        options = {name: torch.float64 if _is_narrow(value) else value for name, value in options.items()}
        return real(*args, **options)

    return call


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW


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
_LOGGED = ("loss", "num_input_tokens_seen", *FIGURES.values(), "eval_loss")
_SHORTEST, _LONGEST = 3, 15


def run_rank(trial: SmallTraining, rank: int, port: int, folder: str) -> None:
    """Carry out the part of one process. It writes what it printed, `REPORT`, and `VALUES`, and exits with 1 if the
    training failed or the layout is refused; the report has the reason.
    """
    place = Path(folder)
    _redirect(place / OUTPUT.format(rank))
    # As many processes as the layout has share this machine's cores; and sums have one order.
    torch.set_num_threads(1)
    _enter(rank, trial.layout.processes, port)
    report: dict[str, Any] = {}
    code = 1
    try:
        with double_precision():
            noted = _train(trial, place, rank)
        report.update(reported=noted.reported, order=list(noted.tensors))
        code = 0
    except (ConfigError, ModelError) as error:
        report["refused"] = str(error)
    except BaseException as error:
        traceback.print_exc()
        report["failed"] = f"{type(error).__name__}: {error}"
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
    variables = World(rank, world, rank, world).variables()
    os.environ.update(variables, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


# --- the training -----------------------------------------------------------------------------------------------------


def _train(trial: SmallTraining, folder: Path, rank: int) -> _Noted:
    """Train and evaluate, and write gradients and weights."""
    noted = _Noted(MAX_NORM if "clips" in trial.facts else 0.0)
    trainer = _trainer(trial, folder, noted)
    trainer.train()
    trainer.evaluate()
    write_tensors(folder / VALUES.format(rank), noted.tensors, files=Files())
    return noted


def _trainer(trial: SmallTraining, folder: Path, noted: TrainerCallback) -> Any:
    rows = _rows(trial)
    held, own = rows[: 2 * trial.batches - 1], [noted]
    if "tuning" not in trial.facts:
        args = _arguments(TrainingArguments, trial, folder)
        return Trainer(_model(trial.config), args, DataCollatorForCausalLM(0), rows, held, callbacks=own)
    from windlass.finetuning.sft_config import SFTConfig
    from windlass.finetuning.sft_trainer import SFTTrainer

    options = {"loss_type": trial.facts.get("loss", "nll"), "dataset_kwargs": {"skip_prepare_dataset": True}}
    args = _arguments(SFTConfig, trial, folder, padding_free="joined" in trial.facts, bf16=False, **options)
    # Its texts are never read.
    tokenizer = train_tokenizer(TokenizerTraining(vocab_size=260), WRITER, ["a"])
    adapter = _adapter() if "adapter" in trial.facts else None
    return SFTTrainer(
        _model(trial.config), args, None, rows, held, tokenizer, callbacks=own, peft_config=adapter
    )


def _adapter() -> Any:
    peft = peft_library("prove the training of an adapter")
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")


def _model(config: dict[str, Any]) -> Any:
    transformers = require("transformers", "prove a layout")
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    made = kind.from_dict({**config, "use_cache": False})
    # Weights so large that attention and experts choose, as those of a trained model do.
    for name in ("initializer_range", "init_std"):
        if hasattr(made, name):
            setattr(made, name, 0.2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(made, experts_implementation="eager")
    with torch.no_grad():  # biases and norms differ from 0 and 1, so that their place matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.to(torch.float64)


def _arguments(
    kind: type[TrainingArguments], trial: SmallTraining, folder: Path, **own: Any
) -> TrainingArguments:
    """The arguments of a layout; those of the recipe that matter are as the facts have them."""
    layout = trial.layout
    sizes: dict[str, Any] = {f"{axis}_size": size for axis, size in layout.sizes if axis != "dp"}
    if layout.along("dp") > 1:
        sizes["dp_replicate_size"] = layout.along("dp")
    if "positions" in trial.facts and layout.along("tp") > 1:
        sizes["tp_sequence_parallel"] = True
    if "pipeline" in trial.facts and layout.along("pp") > 1:
        sizes["pp_schedule"], sizes["pp_stages_per_process"] = trial.facts["pipeline"]
    return kind(
        str(folder / "run"),
        per_device_train_batch_size=trial.micro,
        per_device_eval_batch_size=ROWS,
        gradient_accumulation_steps=trial.accumulation,
        max_steps=UPDATES,
        learning_rate=0.02,
        weight_decay=0.1,
        adam_epsilon=1e-4,  # gradients that should be 0 are rounding, which Adam would divide by itself
        max_grad_norm=MAX_NORM if "clips" in trial.facts else 0.0,
        label_smoothing_factor=0.1 if "smoothing" in trial.facts else 0.0,
        gradient_checkpointing="recompute" in trial.facts,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        log_level="error",
        save_strategy="no",
        train_sampling_strategy="sequential",
        include_num_input_tokens_seen="non_padding",
        parallelism_config=sizes or None,
        **own,
    )


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

    def on_pre_optimizer_step(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._clipped[name] = parameter.grad.detach().clone()

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, value in model.state_dict().items():
            if not isinstance(parameters.get(name), Absent):  # of another stage of a pipeline
                self._keep(f"weight/{state.global_step}/{name}", value)

    def on_log(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
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


def _rows(trial: SmallTraining) -> list[dict[str, list[int]]]:
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
