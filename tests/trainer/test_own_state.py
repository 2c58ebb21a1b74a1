"""Runs of models that save and load in a way of their own, or have state beside tensors, end with the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.odd_tensors import Odd
from tests.trainer.own_state_cases import (
    CASES,
    Copied,
    Growing,
    Normed,
    Partial,
    Renamed,
    Scaled,
    digest,
    fit,
    own_tensors,
)
from tests.trainer.small import Net, weights_hash
from tests.versions import is_older, needs
from torch import nn

from windlass.core.errors import ModelError, WindlassError
from windlass.core.tensors import bits_of, same_bits
from windlass.dist.sharded import whole

CONSTANT = {"lr_scheduler_type": "constant"}
# Of each of the many runs of ranks: it is stopped within the first epoch, and ends in the second.
SHORT: dict[str, Any] = {"steps": 4, "save_steps": 2}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_same_bits(case: str, tmp_path: Path) -> None:
    build = CASES[case]
    clean = fit(build(), tmp_path)
    resumed = fit(build(), tmp_path, resume=str(tmp_path / "checkpoint-3"))
    assert digest(resumed.model) == digest(clean.model)


@pytest.mark.parametrize("case", CASES)
def test_a_script_that_trains_again_from_a_checkpoint_ends_with_the_same_bits(
    case: str, tmp_path: Path
) -> None:
    """The model has what the first run left in it."""
    clean = fit(CASES[case](), tmp_path)
    expected = digest(clean.model)
    again = fit(clean.model, tmp_path, resume=str(tmp_path / "checkpoint-3"))
    assert digest(again.model) == expected


def test_the_best_model_is_loaded_through_the_models_own_method(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, **CONSTANT}
    trainer = fit(Copied(), tmp_path, **best, metric_for_best_model="loss", greater_is_better=True)
    first = fit(Copied(), tmp_path / "first", steps=3, **CONSTANT)
    assert trainer.state.best_global_step == 3
    assert digest(trainer.model) == digest(first.model)


def test_save_model_holds_extra_state(tmp_path: Path) -> None:
    from windlass import load_weights

    trainer = fit(Scaled("bytes"), tmp_path, steps=3)
    trainer.save_model(str(tmp_path / "final"))
    other = Scaled("bytes")
    load_weights(tmp_path / "final", other)
    assert digest(other) == digest(trainer.model)
    assert len(other.history) == 3


def test_constant_buffers_are_not_saved_for_every_rank(tmp_path: Path) -> None:
    model = Net()
    model.register_buffer("mask", torch.ones(64), persistent=False)
    fit(model, tmp_path, steps=3)
    assert b"mask" not in (tmp_path / "checkpoint-3" / "rank-00000.json").read_bytes()


class Unsavable(Net):
    def get_extra_state(self) -> Any:
        return {"seen": {1, 2}}

    def set_extra_state(self, state: Any) -> None:
        pass


class HalfMade(Net):
    def get_extra_state(self) -> Any:
        return {"n": 1}


def sparse() -> nn.Module:
    model = Net()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Partial, r"Partial do not restore 1 parameters that are trained: layer\.bias"),
        (Unsavable, r"'_extra_state' is a dict: state 'seen' is a builtins\.set"),
        (HalfMade, r"set_extra_state of HalfMade \(_extra_state\) failed"),
        (sparse, r"model state 'graph' is a torch\.sparse_coo tensor"),
    ],
)
def test_what_could_not_be_resumed_is_refused_before_training(
    build: Any, message: str, tmp_path: Path
) -> None:
    model = build()
    before = digest_parameters(model)
    with pytest.raises(ModelError, match=message):
        fit(model, tmp_path)
    assert digest_parameters(model) == before
    fit(build(), tmp_path / "unsaved", steps=1, save_strategy="no")


def digest_parameters(model: nn.Module) -> str:
    return weights_hash(dict(model.named_parameters()))


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    def build() -> Partial:
        model = Partial()
        model.layer.bias.requires_grad_(False)
        return model

    clean = fit(build(), tmp_path)
    assert digest(fit(build(), tmp_path, resume=str(tmp_path / "checkpoint-3")).model) == digest(clean.model)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks saw, of runs that were stopped and continued under every strategy."""
    return on_ranks(2, main, tmp_path_factory.mktemp("own_state"), timeout=500)


@pytest.mark.dist
def test_two_ranks_end_with_the_same_bits_as_if_never_stopped(ranks: list[dict[str, Any]]) -> None:
    differing = {
        name: run for rank in ranks for name, run in rank["runs"].items() if run.get("differs") != []
    }
    if is_older("torch", "2.13"):  # FSDP2 gives whole numbers a gradient there, which torch refuses
        differing = {name: run for name, run in differing.items() if "odd" not in name}
    assert not differing
    assert len(ranks[0]["runs"]) == 28


@needs("torch", "2.13", "FSDP2 gives parameters of whole numbers a gradient")
@pytest.mark.dist
def test_tensors_of_every_dtype_and_layout_train_as_in_one_process(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = own_tensors(fit(Odd(), tmp_path, per_device_train_batch_size=8, **SHORT).model)
    for name, run in ranks[0]["runs"].items():
        if not name.endswith(", odd"):
            continue
        for key, expected in alone.items():
            if not expected.numel():
                continue
            found = torch.frombuffer(bytearray.fromhex(run["ended"][key]), dtype=expected.dtype)
            if key[:2] in ("b_", "p_") and key != "p_phase":
                assert same_bits(found.reshape(expected.shape), expected), (name, key)
            else:
                torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=0, atol=1e-5)


@pytest.mark.dist
def test_ranks_refuse_together_what_could_not_be_resumed(ranks: list[dict[str, Any]]) -> None:
    for strategy in ("ddp", "parts"):
        assert all("that are trained: layer.bias" in rank["refused"][strategy] for rank in ranks)


@pytest.mark.parametrize("persistent", [True, False])
def test_tensors_of_every_dtype_and_layout_resume_alone(persistent: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Odd(persistent, sparse=not persistent)

    clean = own_tensors(fit(build(), tmp_path).model)
    resumed = own_tensors(fit(build(), tmp_path, resume=str(tmp_path / "checkpoint-3")).model)
    assert [name for name in clean if not same_bits(clean[name], resumed[name])] == []


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK = int(os.environ.get("RANK", 0))
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp own buffers": {"ddp_broadcast_buffers": False},
    "parts": {"fsdp": "full_shard"},
    "whole": {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}},
}
ON_RANKS: dict[str, Any] = {
    "copies": Copied,
    "renamed": Renamed,
    "extra": Scaled,
    "normed": Normed,
    "growing": Growing,
    "odd": Odd,
    "odd unsaved": lambda: Odd(persistent=False, sparse=True),
}


def hexed(model: nn.Module) -> dict[str, str]:
    return {
        name: bits_of(whole(tensor)).numpy().tobytes().hex() for name, tensor in own_tensors(model).items()
    }


def run(folder: Path, strategy: str, case: str) -> dict[str, Any]:
    """What differs between a run that was stopped and one that was not, on this rank; and how it ended."""
    place, build, options = folder / f"{strategy} {case}", ON_RANKS[case], STRATEGIES[strategy]
    try:
        clean = hexed(fit(build(), place, **SHORT, **options).model)
        stopped = hexed(fit(build(), place, resume=str(place / "checkpoint-2"), **SHORT, **options).model)
    except (WindlassError, RuntimeError) as error:
        if RANK == 0:
            import traceback

            traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"differs": [name for name in clean if clean[name] != stopped.get(name)], "ended": clean}


def refused(folder: Path, strategy: str) -> str:
    try:
        fit(Partial(), folder / f"refused {strategy}", **STRATEGIES[strategy])
    except ModelError as error:
        return str(error)
    return ""


def main(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    said = {
        f"{strategy}, {case}": run(folder, strategy, case) for strategy in STRATEGIES for case in ON_RANKS
    }
    refusals = {strategy: refused(folder, strategy) for strategy in ("ddp", "parts")}
    return {"runs": said, "refused": refusals}
