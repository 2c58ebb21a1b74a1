"""Run by `torch.distributed.run`: two ranks publish on a Hub. Arguments: output folder, token, address of the Hub, and
how long ranks wait for each other. Without an address the package of the Hub is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tests.hub.fixtures import set_address
from tests.hub.test_callback import trainer

from windlass.core.errors import CheckpointError, ConfigError, MissingDependencyError, named

if __name__ == "__main__":
    folder, token, address, *limit = sys.argv[1:]
    if address:
        set_address(address)
    else:
        sys.modules["huggingface_hub"] = None  # type: ignore[assignment]
    limits = {"ddp_timeout": int(limit[0])} if limit else {}
    run = trainer(Path(folder), token, hub_strategy="checkpoint", **limits)
    try:
        run.train()
        if not limit:
            run.push_to_hub()
            card = Path(folder) / "README.md"
            if run.is_world_process_zero():
                card.unlink()
                card.mkdir()
            run.push_to_hub()
    except (ConfigError, MissingDependencyError) as error:
        said = map(str, error.problems) if isinstance(error, ConfigError) else [str(error)]
        line = " ".join(["refused:", *said, f"at step {run.state.global_step}"])
        sys.stdout.write(f"{line}\n")  # in one piece, as the ranks share the stream
        torch.distributed.barrier()
    except (OSError, CheckpointError) as error:
        sys.stdout.write(f"failed: {named(error)}\n")
        torch.distributed.barrier()
