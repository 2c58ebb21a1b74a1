"""A run opens no connection: no telemetry, no look-up, no download."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.laws.source import ROOT

SCRIPT = """
import sys
from pathlib import Path

tried = []

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        tried.append(event)
        raise RuntimeError(f"{event} {arguments}")

sys.addaudithook(refuse)
from tests.trainer.small import Net, arguments, rows
from windlass import Trainer
often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
args = arguments(Path(sys.argv[1]), max_steps=3, **often)
trainer = Trainer(Net(), args, train_dataset=rows(16), eval_dataset=rows(4))
trainer.train()
trainer.save_model()
print("trained", trainer.state.global_step, tried)
try:
    import socket
    socket.create_connection(("127.0.0.1", 9))
except RuntimeError:
    print("watched", len(tried))
"""


def test_a_run_connects_to_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained 3 []" in done.stdout, "who reports home hides that it could not"
    assert "watched 1" in done.stdout, "the hook must see what it is to refuse"
