"""The search works on pages that are opened from the disk, without a request to another server.

The theme loads the script that this needs from a public server; this hook of mkdocs puts the copy in `assets/` there.
"""

from __future__ import annotations

from typing import Any

THEIRS = "https://unpkg.com/iframe-worker/shim"
OURS = "assets/iframe-worker.js"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return the finished page with the script of this site."""
    from mkdocs.utils import get_relative_url

    return output.replace(THEIRS, get_relative_url(OURS, page.url))
