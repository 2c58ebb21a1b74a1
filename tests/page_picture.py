"""A picture of the page of two runs, for the documentation.

    python -m tests.page_picture

trains two small models, writes their report, and takes its picture with a real browser into `docs/images/page.png`.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import address_of, browser

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "page.png"
SHORT = [
    "training.max_steps=100", "training.logging_steps=2", "training.eval_steps=20", "training.save_steps=20",
    "training.save_total_limit=5",
]  # fmt: skip
RUNS = {"slow": ["training.learning_rate=0.002"], "fast": ["training.learning_rate=0.006"]}
HEIGHT, MOST_BYTES = 1010, 300_000


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "windlass"]
        for name, changes in RUNS.items():
            words = [*command, "train", *SHORT, *changes, "--output-dir", name]
            subprocess.run(words, cwd=folder, check=True)
        subprocess.run([*command, "report", *RUNS, "--output-dir", "shown"], cwd=folder, check=True)
        with browser() as tab:
            tab.open(address_of(Path(folder, "shown", "report.html")))
            area = {"x": 0, "y": 0, "width": 1200, "height": HEIGHT, "scale": 0.8}
            shot = tab.call("Page.captureScreenshot", format="png", clip=area, captureBeyondViewport=True)
    picture = base64.b64decode(shot["data"])
    assert len(picture) < MOST_BYTES, len(picture)
    PICTURE.write_bytes(picture)


if __name__ == "__main__":
    main()
