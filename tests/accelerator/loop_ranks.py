"""Two ranks run the loops of `loop_cases` and end as one process did; run by `test_loop_ranks.py`."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.accelerator import loop_cases
from tests.accelerator.loop_cases import loader, make, regression, tiny, whole
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset

from windlass import Accelerator
from windlass.core.errors import CheckpointError, ModelError, RankMismatchError
from windlass.data_loader import BatchSamplerShard, DataLoaderShard

FOLDER = Path(sys.argv[1])


def same_ends(shard: bool) -> None:
    """Losses, norms, rates and weights are those of one process."""
    for name, case in loop_cases.CASES.items():
        want, found = load_file(FOLDER / f"{name}.safetensors"), case(shard)
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, want[key], rtol=1e-10, atol=1e-12, msg=f"{name} {shard} {key}")


def in_fp16() -> None:
    """Whole and sharded models end alike with a loss scale."""
    ends = []
    for shard in (False, True):
        torch.manual_seed(6)
        accelerator = make(shard, mixed_precision="fp16", gradient_accumulation_steps=2)
        model = tiny().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, data = accelerator.prepare(model, optimizer, loader(accelerator))
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x.float()).float(), y.float()))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
        ends.append(whole(accelerator, model))
    for key, tensor in ends[1].items():  # of parts on the main process alone
        torch.testing.assert_close(tensor, ends[0][key], rtol=1e-2, atol=1e-2)


def metrics() -> None:
    """Every sample once, whatever the shares; repeated losses count each sample; plain values travel too."""
    accelerator = make(False)
    data = accelerator.prepare(DataLoader(regression(), batch_size=9))
    rows, repeated, names = [], [], []
    for x, _ in data:
        rows.append(accelerator.gather_for_metrics(x))
        repeated.append(accelerator.gather_for_metrics(torch.full((9,), 2.0)))
        names += accelerator.gather_for_metrics([f"{value:.6f}" for value in x[:, 0].tolist()])
    want = torch.stack([x for x, _ in regression()])
    assert torch.equal(torch.cat(rows), want)
    assert torch.cat(repeated).shape == (len(want),)
    assert names == [f"{value:.6f}" for value in want[:, 0].tolist()]
    # Of a loader whose sampler deals to processes, the rows that it repeats are left out.
    rank, whole = accelerator.process_index, DataLoader(regression(), batch_size=9).batch_sampler
    shard = DataLoaderShard(regression(), batch_sampler=BatchSamplerShard(whole, 2, rank))
    rows, names = [], []
    for x, _ in shard:
        rows.append(accelerator.gather_for_metrics(x))
        names += accelerator.gather_for_metrics([f"{value:.6f}" for value in x[:, 0].tolist()])
    assert torch.equal(torch.cat(rows), want)
    assert names == [f"{value:.6f}" for value in want[:, 0].tolist()]
    # A rank may have nothing to tell, which looks like a nest of no tensors.
    assert accelerator.gather_for_metrics([] if accelerator.is_main_process else ["one"]) == ["one"]
    assert accelerator.gather_for_metrics([]) == []
    number = torch.tensor([float(rank)])
    assert accelerator.gather({"rank": number})["rank"].tolist() == [0.0, 1.0]
    assert accelerator.reduce(number).tolist() == [1.0]
    assert accelerator.reduce(number, "mean").tolist() == [0.5]
    padded = accelerator.pad_across_processes(torch.ones(accelerator.process_index + 1))
    assert padded.shape == (2,)
    with accelerator.split_between_processes(["a", "b", "c"]) as mine:
        assert mine == (["a", "b"] if accelerator.is_main_process else ["c"])


class Halves(IterableDataset[Tensor]):
    """A stream that was split by node: rank 0 has six samples, rank 1 two."""

    _distributed = True

    def __init__(self, rank: int) -> None:
        self.samples = [torch.tensor([float(n)]) for n in ((6, 7) if rank else range(6))]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.samples)


def metrics_of_streams() -> None:
    """A rank whose part has ended runs along, and what it makes of that is counted nowhere."""
    accelerator = make(False)
    data = accelerator.prepare(DataLoader(Halves(accelerator.process_index), batch_size=2))
    rows = [accelerator.gather_for_metrics(x).flatten().tolist() for x in data]
    assert rows == [[0.0, 1.0, 6.0, 7.0], [2.0, 3.0], [4.0, 5.0]], rows


def ranks() -> None:
    accelerator = make(False)
    main = accelerator.process_index == 0
    assert (accelerator.num_processes, accelerator.is_main_process, accelerator.is_last_process) == (
        2,
        main,
        not main,
    )
    assert accelerator.on_last_process(lambda: 5)() == (None if main else 5)
    assert accelerator.on_process(process_index=0)(lambda: 6)() == (6 if main else None)
    assert not accelerator.check_trigger()
    if not main:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    mark = FOLDER / "mark"
    with accelerator.main_process_first():
        assert mark.exists() is not main
        mark.touch()
    with contextlib.suppress(ValueError), accelerator.main_process_first():
        if main:
            raise ValueError("the others need not wait for what comes after it")
    mine = torch.tensor([float(main)])
    assert accelerator.reduce(mine).tolist() == [1.0]


def raw_use() -> None:
    """What was given to `prepare` cannot be trained past what it returned."""
    accelerator = make(False)
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _ = accelerator.prepare(model, optimizer)
    x = torch.ones(2, 6, dtype=torch.float64)
    with pytest.raises(
        ModelError, match=r"Sequential that was given to `accelerator\.prepare` was called directly"
    ):
        model(x)
    with torch.no_grad():
        model(x)
    prepared(x)
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        pickle.loads(pickle.dumps(prepared)),
    ):
        assert torch.equal(copied(x), prepared(x))
    assert accelerator.unwrap_model(prepared) is model
    with pytest.raises(
        ModelError, match=r"SGD that was given to `accelerator\.prepare` was stepped directly"
    ):
        optimizer.step()
    accelerator.free_memory()
    model(x).sum().backward()
    optimizer.step()


def prepared_again(shard: bool) -> None:
    """A second accelerator goes on with what the first one returned, as if there were one."""
    ends = []
    for runs in (1, 2):
        torch.manual_seed(4)
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        objects = model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for _ in range(runs):
            accelerator = make(shard)
            model, optimizer, schedule = objects = accelerator.prepare(*objects)
            for _ in range(2 // runs):
                for x, y in accelerator.prepare(loader(accelerator)):
                    accelerator.backward(F.mse_loss(model(x), y))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            ends.append({**accelerator.get_state_dict(model), "rate": torch.tensor(schedule.get_last_lr())})
            accelerator.free_memory()
    one, _, two = ends
    assert all(torch.equal(one[name], two[name]) for name in one), "prepared again"


def unfrozen() -> None:
    """What replicas would not average is refused, and no process goes on with weights of its own."""
    x = torch.ones(2, 6, dtype=torch.float64)
    for kind in ("one layer", "the model", "a new layer"):
        accelerator, model = make(False), tiny()
        frozen: Any = model[0] if kind == "one layer" else model
        frozen.requires_grad_(kind == "a new layer")
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if kind == "a new layer":
            model.add_module("late", nn.Linear(1, 1, dtype=torch.float64))
            optimizer.add_param_group({"params": list(model.late.parameters())})
        model.requires_grad_(True)
        accelerator.backward(prepared(x).sum())
        for closure in (None, lambda: 0.0):
            with pytest.raises(ModelError, match="frozen when the run began, or were added since"):
                optimizer.step(closure)
        accelerator.free_memory()


def stray_optimizer() -> None:
    accelerator = make(False)
    model, optimizer = accelerator.prepare(tiny(), torch.optim.SGD(tiny().parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 6, dtype=torch.float64)).sum())
    for closure in (None, lambda: 0.0):
        with pytest.raises(
            ModelError,
            match=r"SGD that was prepared updates 4 tensor\(s\) that are no parameter of a prepared model",
        ):
            optimizer.step(closure)


def late_optimizer() -> None:
    """An optimizer that was built before sharding, and prepared after it, follows its model's parameters."""
    accelerator = make(True)
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()  # type: ignore[index]
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    accelerator.backward(model(torch.ones(2, 6, dtype=torch.float64)).sum())
    optimizer.step()
    state = accelerator.get_state_dict(model)
    assert not accelerator.is_main_process or not torch.equal(state["0.weight"], before)


def syncing() -> None:
    """Gradients under `no_sync` are this rank's own until a backward that reduces."""
    accelerator, evaluated = make(False), nn.Linear(1, 1)
    assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated
    evaluated.hf_device_map = {"0": "cpu", "1": "disk"}  # type: ignore[assignment]
    with pytest.raises(ModelError, match="by a device_map cannot be spread over processes too"):
        make(False).prepare(evaluated)
    assert not accelerator.forwards_meet
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    assert accelerator.forwards_meet
    x = torch.full((1, 1), float(accelerator.process_index + 1))
    with accelerator.no_sync(model):
        first, second = model(x).sum(), model(x).sum()
        accelerator.backward(first)
        assert model.weight.grad.item() == accelerator.process_index + 1
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    assert model.weight.grad.item() == 3.0  # twice the mean of 1 and 2


def reduced_once() -> None:
    """Replicas do not step on gradients that a second backward has added on each rank by itself."""
    accelerator, model = make(False), nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.full((1, 1), float(accelerator.process_index + 1))

    def of_one_forward() -> None:
        y = model(x).sum()
        accelerator.backward(y, retain_graph=True)
        accelerator.backward(2 * y)

    def of_two_forwards() -> None:
        first, second = model(x).sum(), model(x).sum()
        accelerator.backward(first)
        accelerator.backward(second)

    def outside_of_no_sync() -> None:
        with accelerator.no_sync(model):
            y = model(x).sum()
        accelerator.backward(y)

    for step in (of_one_forward, of_two_forwards, outside_of_no_sync):
        step()
        with pytest.raises(ModelError, match="were not reduced over ranks"):
            optimizer.step()
        optimizer.zero_grad()
    by_closure = torch.optim.LBFGS([model.module.weight])
    with pytest.raises(ModelError, match="were not reduced over ranks"):
        accelerator.prepare(by_closure).step(of_one_forward)
    optimizer.zero_grad()
    # A backward that reduces takes those before it along.
    outside_of_no_sync()
    accelerator.backward(model(x).sum())
    optimizer.step()
    assert model.weight.grad.item() == 3.0


def one_rate() -> None:
    """A metric of each rank's own would give each another learning rate."""
    accelerator, model = make(False), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, plateau)
    with pytest.raises(
        RankMismatchError, match=r"metrics: 0\.0 on rank 0, 1\.0 on rank 1\n.*accelerator\.reduce"
    ):
        schedule.step(float(accelerator.process_index))
    for metric in (1.0, 2.0):
        schedule.step(torch.tensor(metric))
    assert schedule.get_last_lr() == [0.1]


def uneven() -> None:
    """Data of the script's own, of which one rank has more."""
    accelerator = make(False)
    model = accelerator.prepare(nn.Linear(1, 1))
    steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(1 + accelerator.process_index):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            steps += 1
    assert steps == 1 + accelerator.process_index


def schedule_ends(samples: int, batch_size: int, accumulation: int = 1) -> None:
    """A schedule over the epochs of the unsharded loader is at its end when they are, on two ranks too."""
    accelerator = make(False, gradient_accumulation_steps=accumulation)
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader(Subset(regression(), range(samples)), batch_size=batch_size)
    total = 2 * -(-len(data) // accumulation)
    linear = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total)
    model, optimizer, data, linear, cycle = accelerator.prepare(model, optimizer, data, linear, cycle)
    for _ in range(2):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                linear.step()
                cycle.step()
                optimizer.zero_grad()
    assert linear.scheduler.last_epoch == total, (samples, batch_size, accumulation)
    assert cycle.scheduler.last_epoch <= total


def unit_of_schedules() -> None:
    """One line of the first rank says what schedules count, where an update is more than one of it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("windlass.accelerator.preparing")
    log.addHandler(handler)
    accelerator = make(False)
    for _ in range(2):
        optimizer = torch.optim.SGD(tiny().parameters(), lr=1.0)
        accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    log.removeHandler(handler)
    lines = [line for line in said if "an update advances them by 2" in line]
    assert len(lines) == int(accelerator.is_main_process), said


def train(accelerator: Accelerator, folder: Path | None, epochs: int) -> loop_cases.Result:
    """`epochs` of a loop that continues from `folder`."""
    torch.manual_seed(8)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, schedule, data = accelerator.prepare(
        model, optimizer, schedule, loader(accelerator, shuffle=True)
    )
    if folder is not None:
        accelerator.load_state(folder)
    for _ in range(epochs):
        for x, y in data:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return loop_cases.whole(accelerator, model)


def checkpoints() -> None:
    """Saved by replicas, continued on shards, and the other way round; the end is that of a loop never left."""
    options = {"scheduler_unit": "optimizer_step"}
    want = train(make(False, **options), None, 4)
    for before, after, state in (
        (False, True, "FULL_STATE_DICT"),
        (True, False, "FULL_STATE_DICT"),
        (True, False, "SHARDED_STATE_DICT"),
        (True, True, "SHARDED_STATE_DICT"),
    ):
        accelerator = make(before, state, **options)
        train(accelerator, None, 2)
        if after:  # a hook that leaves the models to the save
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
        folder = accelerator.save_state(FOLDER / "state")
        assert (Path(folder) / "model-rank-00001.safetensors").exists() == state.startswith("SHARD")
        found = train(make(after, **options), Path(folder), 2)
        for key, tensor in found.items():
            torch.testing.assert_close(
                tensor, want[key], rtol=1e-10, atol=1e-12, msg=f"{before} {state} {key}"
            )


class FailsOnOne:
    """Its state can be taken on every rank but the second."""

    def state_dict(self) -> dict[str, int]:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("no state here")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def failed_save() -> None:
    """A rank that cannot save costs this checkpoint, on all ranks, and leaves nothing behind."""
    accelerator = make(False)
    accelerator.prepare(tiny())
    accelerator.register_for_checkpointing(FailsOnOne())
    kind = RuntimeError if accelerator.process_index == 1 else CheckpointError
    with pytest.raises(kind):
        accelerator.save_state(FOLDER / "torn")
    accelerator.wait_for_everyone()
    assert not (FOLDER / "torn").exists()


for sharded in (False, True):
    same_ends(sharded)
    prepared_again(sharded)
in_fp16()
metrics()
metrics_of_streams()
ranks()
raw_use()
unfrozen()
stray_optimizer()
late_optimizer()
syncing()
reduced_once()
one_rate()
uneven()
for case in ((48, 4, 1), (55, 4, 1), (13, 4, 1), (55, 4, 2), (55, 4, 3), (21, 4, 2)):
    schedule_ends(*case)
unit_of_schedules()
checkpoints()
failed_save()
print("LOOPS AGREE")
Accelerator(cpu=True).end_training()
