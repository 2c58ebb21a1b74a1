"""Text that anybody may have written: files of settings, bounded in size, and JSON with one kind of error."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 19  # of a file of settings; a parser takes some thousand times that in memory at worst


def read_text(path: Path) -> str:
    """A file of settings as text.

    Raises:
        OSError: it cannot be read, or is too large for what it should hold. UnicodeDecodeError: it is not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES:,} bytes, too many for settings", str(path))
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """`json.loads(text, **hooks)`.

    Raises:
        json.JSONDecodeError: also where it is nested too deeply, holds a number of absurdly many digits, or is not
            UTF-8.
    """
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except UnicodeDecodeError:
        raise json.JSONDecodeError("not UTF-8 text", "", 0) from None
    except ValueError as error:
        if hooks:
            raise  # a hook's own
        raise json.JSONDecodeError(str(error), "", 0) from None
