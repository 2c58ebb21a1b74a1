"""The ways of training that are killed: between them everything that a checkpoint has to carry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.reliability.faults import INTERRUPTED, LEAVE
from tests.trainer.resume_cases import SAMPLES, Case, Drawing, Net, Quiet, Samples, Stream, sample
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from windlass import TrainerCallback

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
BY_STEPS = {"eval_strategy": "steps", "eval_steps": 2}
BY_EPOCHS = {"eval_strategy": "epoch"}
POISONED = 33  # of SAMPLES: it makes the loss NaN wherever it is met
LONG = 32  # samples behind this one need more memory


@dataclass(frozen=True)
class Trial:
    """One case of the matrix.

    Attributes:
        worlds: numbers of ranks that an attempt may have; more than one where the run changes it on its way.
        exact: whether a killed run ends with the bits of an uninterrupted one; otherwise with the same samples in the
            same order and losses within `tolerance`.
        remote: whether the output folder is a URL, and every attempt is made on a machine that has nothing yet.
        own_disks: whether each rank has a disk of its own.
        unfit: kinds of kill or fault that cannot meet the expectation here, and need not.
    """

    name: str
    case: Case
    worlds: tuple[int, ...] = (1,)
    exact: bool = True
    tolerance: float = 1e-6
    remote: bool = False
    own_disks: bool = False
    unfit: frozenset[str] = field(default_factory=frozenset)

    @property
    def meets_late(self) -> bool:
        """Ranks exchange addresses in a store, which tells of no death, until training begins: DeepSpeed's groups."""
        return "deepspeed" in self.case.arguments

    @property
    def has_workers(self) -> bool:
        return bool(self.case.arguments.get("dataloader_num_workers"))


class StepsAndScores(TrainerCallback):
    """State of a script's own: lost or counted twice, it would show in the log."""

    def __init__(self) -> None:
        self.steps, self.scores = 0, 0.0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps, "scores": self.scores}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.scores += self.steps * metrics["eval_loss"]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs["own_steps"], logs["own_scores"] = self.steps, self.scores


class Poisoned(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        row = sample(index)
        return {**row, "x": row["x"] * float("nan")} if index == POISONED else row


class LongStream(Stream):
    """As long as the runs are that read it, in pieces that workers share."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (sample(index) for index in range(2 * SAMPLES))


class StatefulStream(IterableDataset[dict[str, Any]]):
    """A stream that is entered where it was left."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._next < 2 * SAMPLES:
            self._next += 1
            yield sample(self._next - 1)
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Steep(Net):
    """Its gradients overflow in half precision until the loss scale has come down."""

    def forward(self, x: Tensor, index: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(x, index, labels)
        return 30 * loss, logits


class Plain(nn.Module):
    """In float64 and without draws, so that the number of ranks changes a sum's last bits only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 2)
        self.double()
        self.seen: list[int] = []

    def forward(self, x: Tensor, index: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training and torch.is_grad_enabled():
            self.seen += index.tolist()
        logits = self.head(torch.relu(self.body(x.double())))
        return nn.functional.cross_entropy(logits, labels), logits


class Single(Plain):
    """In fp32, as DeepSpeed's engine computes."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor, index: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training and torch.is_grad_enabled():
            self.seen += index.tolist()
        logits = self.head(torch.relu(self.body(x)))
        return nn.functional.cross_entropy(logits, labels), logits


class Narrow(Plain):
    """Memory holds no micro-batch of more than two samples, if one of them is long."""

    def forward(self, x: Tensor, index: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training and torch.is_grad_enabled() and len(x) > 2 and bool((index > LONG).any()):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().forward(x, index, labels)


class Layered(nn.Module):
    """Layers that can be divided among ranks, and cut into two stages. Dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)
        self.tp_plan = {"up": "colwise", "down": "rowwise"}
        self.dummy_inputs = {"x": torch.ones(2, 6), "index": torch.arange(2), "labels": torch.arange(2)}
        self.seen: list[int] = []

    def forward(self, x: Tensor, index: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training and torch.is_grad_enabled():
            self.seen += index.tolist()
        logits = self.head(self.norm(self.down(self.drop(torch.relu(self.up(x))))))
        return nn.functional.cross_entropy(logits, labels), logits


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, width) / width)

    def forward(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return (torch.einsum("tw,tkwv->tkv", states, self.up[chosen]) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """Experts that can be divided among ranks. Dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.router, self.experts = nn.Linear(6, 8), nn.Linear(8, 4), Experts(4, 8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 2)
        self.ep_plan = {"experts": "ep_dispatch_experts", "experts.up": "grouped_gemm"}
        self.seen: list[int] = []

    def forward(self, x: Tensor, index: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training and torch.is_grad_enabled():
            self.seen += index.tolist()
        states = torch.relu(self.body(x))
        weights, chosen = self.router(states).softmax(-1).topk(2)
        logits = self.head(self.drop(states + self.experts(states, chosen, weights)))
        return nn.functional.cross_entropy(logits, labels), logits


def adapted() -> nn.Module:
    """All that is trained are an adapter and the layers saved beside it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["body"], modules_to_save=["norm", "head"], lora_dropout=0.2)
    return get_peft_model(Net(), config)  # type: ignore[arg-type]


class SamplesSeen(TrainerCallback):
    """Notes the samples of every update in `seen-RANK.txt`, so that a killed process leaves what it had seen.

    A line is: number of the attempt, step, samples.
    """

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self._path, self._attempt = folder / f"seen-{rank}.txt", attempt
        self._told = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        seen = model.seen if hasattr(model, "seen") else model.module.seen
        with self._path.open("a") as file:
            file.write(f"{self._attempt} {state.global_step} {' '.join(map(str, seen[self._told :]))}\n")
        self._told = len(seen)


def own_callbacks() -> list[Any]:
    return [StepsAndScores()]


def of_ranks(**changes: Any) -> dict[str, Any]:
    """Several ranks share the updates. Batch norm needs two samples at least."""
    return {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **changes}


def axes(**changes: Any) -> dict[str, Any]:
    """Sizes of axes, and other arguments."""
    sizes = {
        name: changes.pop(name) for name in list(changes) if name.startswith(("tp_", "pp_", "ep_", "dp_"))
    }
    return of_ranks(parallelism_config=sizes, **changes)


def stages(**changes: Any) -> dict[str, Any]:
    """Two stages, the second of which begins with the norm."""
    return axes(pp_size=2, pp_split_points=["norm"], **changes)


_SHARDED = {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
_ON_PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
}
_ELASTIC = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 12,
    "num_train_epochs": 3,
    "logging_steps": 1,
}
# A disk that costs a run its best checkpoint costs it the best weights too, so that its end may differ.
_NO_LOSS = frozenset({"full disk", "failing disk"})
# What lets a run that goes back find another checkpoint than an undisturbed one.
_OTHER_CHECKPOINTS = _NO_LOSS | {"damage", LEAVE, INTERRUPTED}

TRIALS = [
    Trial("one process", Case(BY_EPOCHS, callbacks=own_callbacks)),
    Trial(
        "the best is kept and loaded",
        Case({**BEST, **BY_STEPS, "save_steps": 4, "save_total_limit": 1}, callbacks=own_callbacks),
        unfit=_NO_LOSS | {"damage"},
    ),
    Trial(
        "two of the best and the newest are kept",
        Case({**BEST, **BY_STEPS, "save_steps": 3, "save_total_limit": None, "keep_last": 1, "keep_best": 2}),
        unfit=_NO_LOSS | {"damage"},
    ),
    Trial(
        "saved by epochs",
        Case({"save_strategy": "epoch", **BY_EPOCHS, "num_train_epochs": 4, "max_grad_norm": 0.5}),
    ),
    Trial("saved while training waits", Case({"save_in_background": False, **BY_STEPS})),
    Trial("workers read ahead", Case({"dataloader_num_workers": 2, **BY_EPOCHS})),
    Trial("a stream", Case({"max_steps": 9, "save_steps": 2, **BY_STEPS}, dataset=LongStream)),
    Trial("a stream with a state", Case({"max_steps": 9, "save_steps": 2, **BY_STEPS}, dataset=StatefulStream)),
    Trial("a stream read by workers", Case({"max_steps": 9, "dataloader_num_workers": 2}, dataset=LongStream)),
    Trial(
        "rolled back",
        Case({"nonfinite_policy": "rollback", "save_steps": 2, "logging_steps": 1}, dataset=Poisoned),
        unfit=_OTHER_CHECKPOINTS,
    ),
    Trial(
        "rolled back in fp16",
        Case(
            {"nonfinite_policy": "rollback", "fp16": True, "save_steps": 2, "logging_steps": 1, **BY_EPOCHS},
            dataset=Poisoned,
            callbacks=own_callbacks,
        ),
        unfit=_OTHER_CHECKPOINTS,
    ),
    Trial("saved by the clock", Case({"save_every": 0.02, "save_steps": 4, "num_train_epochs": 4, **BY_EPOCHS})),
    Trial("a step that draws", Case({**BY_EPOCHS, "save_steps": 2}, dataset=Quiet, trainer=Drawing)),
    Trial(
        "fp16, led by a metric",
        Case({**BEST, **BY_STEPS, **_ON_PLATEAU, "fp16": True}, model=Steep),
        unfit=_NO_LOSS | {"damage"},
    ),
    Trial(
        "a remote folder, machine after machine",
        Case({**BY_STEPS, "save_steps": 2}),
        remote=True,
        unfit=frozenset({"damage", "stale folders"}),  # of this machine, which each attempt leaves
    ),
    Trial("two ranks", Case(of_ranks(**BY_STEPS), callbacks=own_callbacks), (2,)),
    Trial("three ranks", Case(of_ranks(**BY_EPOCHS, save_steps=2)), (3,)),
    Trial(
        "two ranks, a stream, the best",
        Case(of_ranks(**BEST, **BY_STEPS, max_steps=9, save_steps=4), dataset=LongStream),
        (2,),
        unfit=_NO_LOSS | {"damage"},
    ),
    Trial("two ranks, sharded", Case(of_ranks(**_SHARDED, **BY_EPOCHS)), (2,)),
    Trial(
        "three ranks, sharded, the best",
        Case(of_ranks(**_SHARDED, **BEST, **BY_STEPS, save_total_limit=1), callbacks=own_callbacks),
        (3,),
        unfit=_NO_LOSS | {"damage"},
    ),
    Trial(
        "two ranks, workers that stay",
        Case(of_ranks(dataloader_num_workers=1, dataloader_persistent_workers=True, **BY_EPOCHS)),
        (2,),
    ),
    Trial("an adapter", Case(BY_EPOCHS, model=adapted)),
    Trial("two ranks, an adapter, sharded", Case(of_ranks(**_SHARDED, **BY_STEPS), model=adapted), (2,)),
    Trial(
        "two machines with disks of their own",
        Case(of_ranks(**BY_EPOCHS, save_steps=2)),
        (2,),
        own_disks=True,
        unfit=frozenset({"damage", "stale folders"}),  # of one disk
    ),
    Trial("two stages of a pipeline", Case(stages(**BY_STEPS), model=Layered, callbacks=own_callbacks), (2,)),
    Trial(
        "micro-batches that memory does not hold",
        Case({"auto_find_batch_size": True, **BY_EPOCHS}, model=Narrow),
        exact=False,
    ),
    Trial("two ranks that divide layers", Case(axes(tp_size=2, **BY_EPOCHS), model=Layered), (2,)),
    Trial("two ranks that divide experts", Case(axes(ep_size=2, **BY_STEPS), model=Mixture), (2,)),
    Trial("four ranks, stages of divided layers", Case(stages(tp_size=2, **BY_EPOCHS), model=Layered), (4,)),
    Trial("one, two and three ranks in turn", Case(_ELASTIC, model=Plain), (1, 2, 3), exact=False),
    Trial("the same, sharded", Case({**_ELASTIC, **_SHARDED}, model=Plain), (1, 2, 3), exact=False),
]  # fmt: skip


def zero(stage: int, **changes: Any) -> dict[str, Any]:
    return of_ranks(deepspeed={"zero_optimization": {"stage": stage}}, **changes)


# These need DeepSpeed.
ZERO_TRIALS = [
    Trial("two ranks, ZeRO-1", Case(zero(1, **BY_EPOCHS), callbacks=own_callbacks), (2,)),
    Trial("two ranks, ZeRO-3", Case(zero(3, **BY_EPOCHS), callbacks=own_callbacks), (2,)),
    Trial(
        "two ranks, ZeRO-1, the best",
        Case(zero(1, **BEST, **BY_STEPS, save_steps=4, save_total_limit=1)),
        (2,),
        unfit=_NO_LOSS | {"damage"},
    ),
    Trial(
        "three ranks, ZeRO-3, the best",
        Case(zero(3, **BEST, **BY_STEPS, save_total_limit=1), callbacks=own_callbacks),
        (3,),
        unfit=_NO_LOSS | {"damage"},
    ),
    Trial(
        "two ranks, ZeRO-3, rolled back",
        Case(zero(3, nonfinite_policy="rollback", save_steps=2, logging_steps=1), dataset=Poisoned),
        (2,),
        unfit=_OTHER_CHECKPOINTS,
    ),
    Trial(
        "two ranks, ZeRO-2, saved while training waits", Case(zero(2, save_in_background=False, **BY_STEPS)), (2,)
    ),
    *(
        Trial(
            f"one, two and three ranks in turn, ZeRO-{stage}",
            Case({**_ELASTIC, "deepspeed": {"zero_optimization": {"stage": stage}}}, model=Single),
            (1, 2, 3),
            exact=False,
            tolerance=5e-6,
        )
        for stage in (1, 3)
    ),
]  # fmt: skip
# Those above whose ranks compute with parts of the model, and one more: struck by themselves, each is struck often.
LAYOUT_TRIALS = [
    *(trial for trial in TRIALS if "parallelism_config" in trial.case.arguments),
    Trial("four ranks, stages of shards", Case(stages(dp_shard_size=2, **BY_STEPS), model=Layered), (4,)),
]
SETS = {"standard": TRIALS, "zero": ZERO_TRIALS, "layouts": LAYOUT_TRIALS}


def trial(name: str) -> Trial:
    return next(trial for trials in SETS.values() for trial in trials if trial.name == name)
