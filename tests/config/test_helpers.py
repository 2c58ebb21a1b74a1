"""What the arguments answer about this process, and the grouped setters."""

from __future__ import annotations

import inspect
import logging
from datetime import timedelta
from typing import Any

import pytest
from tests.versions import with_pinned

from windlass.config.arguments import TrainingArguments
from windlass.config.enums import ParallelMode
from windlass.config.setters import Setters
from windlass.config.validate import problems


def _world(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, local_rank: int, local_size: int) -> None:
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


def test_alone() -> None:
    args = TrainingArguments("out", per_device_train_batch_size=3, per_device_eval_batch_size=5, use_cpu=True)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert (args.train_batch_size, args.eval_batch_size, args.n_gpu) == (3, 5, 0)
    assert (args.should_log, args.should_save, args.device.type) == (True, True, "cpu")
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert args.ddp_timeout_delta == timedelta(seconds=1800)
    assert args.place_model_on_device is None
    with args.main_process_first(desc="nothing to wait for"):
        pass


@pytest.mark.parametrize(
    ("place", "each_node", "logs", "saves"),
    [((0, 4, 0, 2), True, True, True), ((1, 4, 1, 2), True, False, False), ((2, 4, 0, 2), True, True, False),
     ((2, 4, 0, 2), False, False, False)],
)  # fmt: skip
def test_in_a_job(
    place: tuple[int, int, int, int],
    each_node: bool,
    logs: bool,
    saves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _world(monkeypatch, *place)
    monkeypatch.setattr(logging.getLogger("windlass"), "level", logging.INFO)
    args = TrainingArguments("out", log_on_each_node=each_node)
    assert (args.process_index, args.world_size, args.local_process_index) == (place[0], place[1], place[2])
    assert (args.should_log, args.should_save, args.parallel_mode) == (logs, saves, ParallelMode.DISTRIBUTED)
    assert args.get_process_log_level() == (logging.INFO if logs else logging.WARNING)


@pytest.mark.parametrize(
    ("settings", "rank", "level"),
    [({}, 0, logging.INFO), ({}, 1, logging.WARNING), ({"log_level": "error"}, 0, logging.ERROR),
     ({"log_level": "error"}, 1, logging.WARNING), ({"log_level_replica": "debug"}, 1, logging.DEBUG),
     ({"log_level_replica": "passive"}, 1, logging.WARNING)],
)  # fmt: skip
def test_levels(settings: dict[str, Any], rank: int, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _world(monkeypatch, rank, 2, rank, 2)
    monkeypatch.setattr(logging.getLogger("windlass"), "level", logging.INFO)  # as a script may have set it
    assert TrainingArguments("out", **settings).get_process_log_level() == level


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (10, 10), (0.1, 11), (0.5, 51), (1, 1), (250, 250)])
def test_warmup_is_rounded_up(warmup: float, steps: int) -> None:
    assert TrainingArguments("out", warmup_steps=warmup).get_warmup_steps(101) == steps


def test_sanitized_values_are_plain() -> None:
    values = TrainingArguments("out", label_names=["a"]).to_sanitized_dict()
    assert values["train_batch_size"] == 8
    assert values["label_names"] == "['a']"
    assert {type(v) for v in values.values()} <= {bool, int, float, str}


def test_setters_set_what_scripts_expect() -> None:
    args = TrainingArguments("out").set_training(
        learning_rate=1e-4, batch_size=2, gradient_checkpointing=True
    )
    args.set_evaluate("steps", steps=10).set_testing(batch_size=7).set_save("epoch", total_limit=2)
    args.set_logging("steps", steps=5, level="info").set_optimizer("sgd", weight_decay=0.1)
    args.set_lr_scheduler("cosine", warmup_steps=0.1).set_dataloader(
        train_batch_size=3, num_workers=2, sampler_seed=1
    )
    assert problems(args) == []
    assert (args.learning_rate, args.activation_checkpointing, args.do_train) == (5e-5, True, True)
    assert (args.eval_strategy, args.eval_steps, args.do_predict) == ("steps", 10, True)
    assert (args.save_strategy, args.save_total_limit, args.log_level) == ("epoch", 2, "info")
    assert (args.optim, args.lr_scheduler_type, args.data_seed) == ("sgd", "cosine", 1)
    assert (args.per_device_train_batch_size, args.per_device_eval_batch_size) == (3, 8)
    with pytest.raises(ValueError, match="above 0"):
        args.set_save("steps", steps=0)
    args.set_push_to_hub("me/model")
    assert (args.push_to_hub, args.hub_model_id, problems(args)) == (True, "me/model", [])


@with_pinned("transformers")
def test_setters_take_what_theirs_take() -> None:
    transformers = pytest.importorskip("transformers")
    for name in [n for n in vars(transformers.TrainingArguments) if n.startswith("set_")]:
        theirs = inspect.signature(getattr(transformers.TrainingArguments, name)).parameters
        ours = inspect.signature(getattr(Setters, name)).parameters
        assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}, name


def test_the_state_of_the_process_is_found_at_the_arguments() -> None:
    args = TrainingArguments("out", use_cpu=True)
    state = args.distributed_state
    assert (state.num_processes, state.process_index, state.is_main_process) == (1, 0, True)
    assert state.device.type == "cpu"
    assert args.deepspeed_plugin is None
    assert "distributed_state" not in args.to_dict()
