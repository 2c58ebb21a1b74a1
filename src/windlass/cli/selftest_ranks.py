"""The checks of `windlass test` in each process: updates of several processes, compared with those of one.

Run by the launcher, as `windlass launch -m windlass.cli.selftest_ranks`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from windlass.accelerator.accelerator import Accelerator
from windlass.config.loop_options import Plugin
from windlass.core.output import say
from windlass.core.outside import load_outside
from windlass.core.whole_file import write_whole
from windlass.dist.beacon import beacon
from windlass.dist.operations import gather_object

_SAMPLES, _WIDTH = 12, 8
# fp32 on devices that order sums differently; updates are of the order of 0.1.
_TOLERANCE = 1e-5
_CHECKPOINT = "a checkpoint is loaded as it was saved"


def main(path: str | None = None) -> int:
    """Run the checks; return 1 if one fails. The main process prints a line of each, or writes all to `path`."""
    checks: dict[str, Callable[[], str | None]] = {
        "values reach every process": exchanges,
        "a replicated update equals that of one process": update,
        "a sharded update equals that of one process": lambda: update(_sharded()),
    }
    several_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    if not several_machines:
        checks[_CHECKPOINT] = checkpoint
    found: list[dict[str, str | None]] = []
    for name, check in checks.items():
        beacon().call(name)
        wrong = check()
        found.append({"name": name, "result": "passed" if wrong is None else "failed", "detail": wrong})
        _show(found[-1], path)
    if several_machines:
        why = "skipped, since no folder is known that all machines share"
        found.append({"name": _CHECKPOINT, "result": "skipped", "detail": why})
        _show(found[-1], path)
    failed = any(one["result"] == "failed" for one in found)
    if Accelerator().is_main_process:
        if path is not None:
            write_whole(Path(path), json.dumps(found))
        elif not failed:
            say("windlass test: all checks passed")
    return int(failed)


def _show(one: dict[str, str | None], path: str | None) -> None:
    if path is None and Accelerator().is_main_process:
        sign = {"passed": "ok  ", "failed": "FAIL", "skipped": "--  "}[str(one["result"])]
        detail = "" if one["detail"] is None else f": {one['detail']}"
        say(f"  {sign} {one['name']}{detail}")


def _sharded() -> Plugin:
    plugin: Plugin = load_outside("plugins of FSDP").FullyShardedDataParallelPlugin(fsdp_version=2)
    return plugin


def exchanges() -> str | None:
    """Gather the number of each rank."""
    accelerator = Accelerator()
    mine = torch.tensor([accelerator.process_index], device=accelerator.device)
    found = accelerator.gather(mine).tolist()
    return None if found == list(range(accelerator.num_processes)) else f"gathered {found}"


def update(plugin: Plugin | None = None) -> str | None:
    """Compare an update by all processes on shares of a batch with one on the whole batch."""
    accelerator = Accelerator(fsdp_plugin=plugin)
    model, inputs, targets = _problem()
    expected = _updated_alone(model, inputs, targets)
    found = accelerator.get_state_dict(_updated_together(accelerator, model, inputs, targets))
    return _difference(found, expected) if accelerator.is_main_process else None


def checkpoint() -> str | None:
    """Save a sharded model, overwrite it, and load it."""
    accelerator = Accelerator(fsdp_plugin=_sharded())
    with tempfile.TemporaryDirectory() as own:
        folder = Path(str(gather_object([own])[0])) / "state"
        model = _updated_together(accelerator, *_problem())
        accelerator.save_state(str(folder))
        saved = accelerator.get_state_dict(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(str(folder))
        found = accelerator.get_state_dict(model)
        accelerator.wait_for_everyone()
    return _difference(found, saved) if accelerator.is_main_process else None


def _problem() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / _WIDTH)
    inputs = torch.randn(_SAMPLES, _WIDTH, generator=generator)
    return model, inputs, torch.randn(_SAMPLES, 1, generator=generator)


def _updated_alone(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Plain PyTorch, on a copy."""
    copy, _, _ = _problem()
    copy.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
    nn.functional.mse_loss(copy(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return copy.state_dict()


def _updated_together(
    accelerator: Accelerator, model: nn.Module, inputs: Tensor, targets: Tensor
) -> nn.Module:
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, size = accelerator.process_index, accelerator.num_processes
    share = [part.tensor_split(size)[rank].to(accelerator.device) for part in (inputs, targets)]
    # A sum, since the mean over ranks of means is the mean of the batch only for equal shares.
    loss = nn.functional.mse_loss(model(share[0]), share[1], reduction="sum") * size / _SAMPLES
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return model


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    worst = max(float((found[name].cpu() - expected[name].cpu()).abs().max()) for name in expected)
    return None if worst <= _TOLERANCE else f"weights differ by {worst:.2g}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
