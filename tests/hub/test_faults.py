"""Many faults of the Hub, at random requests: no run is lost, and no half checkpoint is ever on the Hub."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from tests.hub.server import Fault, Hub
from tests.hub.test_callback import trainer
from tests.trainer.small import Net

from windlass import TrainerCallback
from windlass.hub import uploads

RUNS, SAVES = 20, 10
REQUESTS = ("POST .*/preupload/", "POST .*/batch", "PUT /lfs/", "POST .*/commit/", "GET .*/tree/")
# The last two are a Hub that is full.
ANSWERS = (401, 403, 409, 429, 500, 413, 507)


def fault(chance: random.Random) -> Fault:
    """One fault of the kinds that a Hub has, at the next request of a random kind."""
    match, kind = chance.choice(REQUESTS), chance.choice((*ANSWERS, "stall", "cut", "half", "lost"))
    if isinstance(kind, int):
        return Fault(match, status=kind)
    return Fault(match, **{kind: 0.3 if kind == "stall" else True})  # type: ignore[arg-type]


class OneFaultForEachSave(TrainerCallback):
    def __init__(self, hub: Hub, chance: random.Random) -> None:
        self.hub, self.chance, self.made = hub, chance, list[Fault]()

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.made.append(fault(self.chance))
        self.hub.faults = [*self.hub.faults, self.made[-1]]


def check_whole(hub: Hub, tree: dict[str, str]) -> bool:
    """Check the `last-checkpoint` of one commit: all files of its manifest, with their hashes, and no others."""
    found = {name.removeprefix("last-checkpoint/"): oid for name, oid in tree.items() if "/" in name}
    if not found:
        return False
    manifest = json.loads(hub.blobs[found.pop("manifest.json")])
    listed = manifest["files"]
    assert found.keys() == listed.keys()
    for name, entry in listed.items():
        content = hub.blobs[found[name]]
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["size"], entry["sha256"]), name
    return True


@pytest.mark.slow
def test_two_hundred_faults(
    hub: Hub, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub.utils import http_backoff

    monkeypatch.setattr(uploads, "_PAUSES", (0.01,))
    monkeypatch.setitem(http_backoff.__kwdefaults__, "base_wait_time", 0.01)  # the client's own pauses
    whole = trainer(tmp_path / "whole", token, SAVES, push_to_hub=False)
    whole.train()
    chance, met, commits, listed = random.Random(0), 0, 0, 0
    for number in range(RUNS):
        hub.reset()
        caplog.clear()
        run = trainer(
            tmp_path / str(number),
            token,
            SAVES,
            save_steps=1,
            hub_strategy="checkpoint",
            hub_always_push=True,
        )
        faults = OneFaultForEachSave(hub, chance)
        run.add_callback(faults)
        run.train()
        assert run.state.global_step == SAVES
        assert isinstance(run.model, Net)
        assert torch.equal(run.model.layer.weight, whole.model.layer.weight)
        trees = [tree for _, tree in hub.repositories["someone/run"].commits]
        done = sum(check_whole(hub, tree) for tree in trees)
        left = caplog.text.count("; later: windlass checkpoint push")
        assert done + left >= SAVES, "each save is on the Hub or listed"
        met += sum(one.times == 0 for one in faults.made)
        commits, listed = commits + done, listed + left
        assert token not in caplog.text
    print(f"{met} faults in {RUNS} runs: {commits} whole checkpoints on the Hub, {listed} uploads listed")
    assert met >= 0.9 * RUNS * SAVES
