"""Run by `torch.distributed.run`: two ranks publish on a Hub. Arguments: output folder, token, address of the Hub, and
how long ranks wait for each other.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.hub.fixtures import set_address
from tests.hub.test_callback import trainer

from windlass.core.errors import ConfigError

if __name__ == "__main__":
    folder, token, address, *limit = sys.argv[1:]
    set_address(address)
    limits = {"ddp_timeout": int(limit[0])} if limit else {}
    run = trainer(Path(folder), token, hub_strategy="checkpoint", **limits)
    try:
        run.train()
        if not limit:
            run.push_to_hub()
    except ConfigError as error:
        line = " ".join(["refused:", *map(str, error.problems), f"at step {run.state.global_step}"])
        sys.stdout.write(f"{line}\n")  # in one piece, as the ranks share the stream
