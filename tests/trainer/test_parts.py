"""Streams that split themselves by rank: every sample counts once, and what cannot be dealt is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.dist.launch import on_ranks
from tests.trainer import parts_cases as cases
from tests.trainer.parts_cases import COUNT, Whole, trainer_for
from torch.utils.data import DataLoader

from windlass import Accelerator
from windlass.compat.state import AcceleratorState, GradientState
from windlass.core.errors import DataError
from windlass.dist.sharded import whole

Ranks = list[dict[str, Any]]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return on_ranks(2, main, tmp_path_factory.mktemp("parts"), timeout=300)


@pytest.mark.parametrize("name", ["ByRank", "ByRankAndWorker", "Sized", "by_node", "accumulating", "sharded"])
def test_every_sample_is_trained_on_once_an_epoch(ranks: Ranks, name: str) -> None:
    first, second = (Counter(said[name]["seen"]) for said in ranks)
    assert sorted([*first, *second]) == list(range(COUNT)), "each rank has its own part"
    assert set(first.values()) == {2}
    assert min(second.values()) == 2, "more often only where it runs along with nothing of its own left"
    steps = 6 if name == "accumulating" else 12
    assert all(said[name]["steps"][:2] == [steps, steps] for said in ranks)
    assert ranks[0][name]["weights"] == ranks[1][name]["weights"]


def test_parts_that_are_drawn_anew_in_every_epoch_cover_the_data(ranks: Ranks) -> None:
    both = Counter(i for said in ranks for i in said["Shuffled"]["seen"])
    assert sorted(both) == list(range(COUNT))
    assert min(both.values()) == 2
    assert set(ranks[0]["Shuffled"]["seen"]) & set(ranks[1]["Shuffled"]["seen"]), (
        "the second epoch has other parts"
    )


def test_losses_weigh_each_sample_once(ranks: Ranks, tmp_path: Path) -> None:
    """One process that reads the whole makes the same updates, as every second sample of a batch is a rank's."""
    alone = trainer_for(tmp_path, Whole(), per_device_train_batch_size=4)
    alone.train()
    logs = [row["loss"] for row in alone.state.log_history if "loss" in row]
    for name in ("ByRank", "ByRankAndWorker", "Sized", "by_node", "sharded"):
        assert ranks[0][name]["logs"] == pytest.approx(logs, rel=1e-6), name


@pytest.mark.parametrize("step", [2, 6, 10])
def test_a_resumed_run_has_the_same_bits(ranks: Ranks, step: int) -> None:
    for said in ranks:
        whole, resumed = said["ByRank"], said[f"resumed-{step}"]
        assert resumed["weights"] == whole["weights"]
        assert whole["seen"][-len(resumed["seen"]) :] == resumed["seen"]
        assert resumed["logs"] == whole["logs"]


def test_a_generator_that_is_read_once_loses_nothing(ranks: Ranks) -> None:
    assert {i for said in ranks for i in said["ReadOnce"]["seen"]} == set(range(COUNT))


def test_evaluation_counts_every_sample_once(ranks: Ranks) -> None:
    for said in ranks:
        whole, by_rank, by_node, first_alone = said["evaluated"]
        assert len(whole) == COUNT + 1
        for other in (by_rank, by_node, first_alone):
            assert other == pytest.approx(whole, rel=1e-6)


def test_loops_of_the_users_own_see_every_sample_once_a_pass(ranks: Ranks) -> None:
    for loops in zip(*(said["loops"] for said in ranks), strict=True):
        for passes in zip(*loops, strict=True):
            assert sorted(i for seen in passes for i in seen) == list(range(COUNT))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("random", "beginning it again returns other samples"),
        ("random loop", "beginning it again returns other samples"),
        ("random evaluation", "beginning it again returns other samples"),
        ("ends early", "1 of 2 ranks have come to the end"),
        ("nothing", "ranks [1] have no sample at all"),
        ("nothing loop", "ranks [1] have no sample at all"),
    ],
)
def test_what_cannot_be_dealt_is_refused_on_every_rank(ranks: Ranks, name: str, words: str) -> None:
    for said in ranks:
        assert words in said["refused"][name]


# --- what each rank runs ----------------------------------------------------------------------------------------------


FOLDER = Path()  # where the runs are, set by `main`


def run(name: str, stream: Any, resume: str | None = None, **changes: Any) -> dict[str, Any]:
    trainer = trainer_for(FOLDER / name, stream, **changes)
    trainer.train(resume_from_checkpoint=resume)
    logs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = [whole(p.detach()).tolist() for p in trainer.model.parameters()]
    steps = trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch
    return {"seen": trainer.seen, "logs": logs, "weights": weights, "steps": steps}


def in_training() -> dict[str, Any]:
    said = {
        "ByRank": run("by-rank", cases.ByRank(), save_strategy="steps", save_steps=2),
        "ByRankAndWorker": run("by-worker", cases.ByRankAndWorker(), dataloader_num_workers=2),
        "Shuffled": run("shuffled", cases.Shuffled()),
        "Sized": run("sized", cases.Sized(), max_steps=-1, num_train_epochs=2),
        "by_node": run("by-node", cases.ByNode()),
        "accumulating": run("accumulating", cases.ByRank(), gradient_accumulation_steps=2, max_steps=6),
        "sharded": run("sharded", cases.ByRank(), fsdp="full_shard"),
        "ReadOnce": run("once", cases.ReadOnce(), max_steps=6),
    }
    for step in (2, 6, 10):
        resumed = str(FOLDER / "by-rank" / f"checkpoint-{step}")
        said[f"resumed-{step}"] = run(f"resumed-{step}", cases.ByRank(), resumed)
    return said


def evaluated(stream: Any, **changes: Any) -> list[float]:
    found: list[float] = []

    def measure(prediction: Any) -> dict[str, float]:
        found.extend(prediction.label_ids.tolist())
        return {"count": float(len(prediction.label_ids))}

    trainer = trainer_for(FOLDER / "evaluated", None, eval_dataset=stream, compute_metrics=measure, **changes)
    metrics = trainer.evaluate()
    assert metrics["eval_count"] == len(found)
    return [metrics["eval_loss"], *sorted(found)]


def own_loop(stream: Any, batch_size: int | None = 2, **settings: Any) -> list[list[int]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **settings)
    loader = accelerator.prepare(DataLoader(stream, batch_size=batch_size))
    return [
        [
            i
            for batch in loader
            if not loader.is_filler
            for i in ([batch["index"]] if batch_size is None else batch["index"].tolist())
        ]
        for _ in range(2)
    ]


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except DataError as error:
        return str(error)
    return "nothing"


def main(folder: Path) -> dict[str, Any]:
    global FOLDER
    FOLDER = folder
    trainer = trainer_for(FOLDER / "first", cases.Whole())  # opens the process group
    said = in_training()
    said["evaluated"] = [
        evaluated(cases.Whole()),
        evaluated(cases.ByRank()),
        evaluated(cases.ByNode()),
        evaluated(cases.NothingForTheLast()),
    ]
    said["loops"] = [
        own_loop(cases.Whole()),
        own_loop(cases.ByRank()),
        own_loop(cases.ByRankAndWorker()),
        own_loop(cases.ByRank(), batch_size=None),
    ]
    said["refused"] = {
        "random": refused(lambda: run("random", cases.OfItsOwnRandomness())),
        "random loop": refused(lambda: own_loop(cases.OfItsOwnRandomness())),
        "random evaluation": refused(lambda: evaluated(cases.OfItsOwnRandomness())),
        "ends early": refused(lambda: run("early", cases.EndsEarly())),
        "nothing": refused(lambda: run("nothing", cases.NothingForTheLast())),
        "nothing loop": refused(lambda: own_loop(cases.NothingForTheLast())),
    }
    dist.barrier()
    trainer.end()
    return said
