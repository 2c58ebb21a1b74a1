"""The datasets of another program's configuration, as the section `data` of a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.compat.conversion.shared import Conversion, ForeignConfig
from windlass.text.conversations import is_conversational, is_conversational_from_value


@dataclass(slots=True)
class Dataset:
    path: str  # a file, a folder, or a name on the hub
    options: dict[str, Any] = field(default_factory=dict)  # keys of the section `data` with which it is read
    weight: float | None = None  # its share of a mixture; None = by the number of its rows
    conversational: bool = False  # its rows are conversations

    def __post_init__(self) -> None:
        if is_on_hub(self.path):
            self.options["format"] = "hub"


def is_on_hub(path: str) -> bool:
    """Return True unless the path names a file or folder of this machine."""
    return not Path(path).suffix and not Path(path).exists()


def holds_conversations(path: str) -> bool:
    """Return True if the first row of a file of JSON is a conversation; False also if it cannot be read."""
    file = Path(path)
    if file.suffix not in (".json", ".jsonl"):
        return False
    try:
        with file.open(encoding="utf-8") as lines:
            rows = json.loads(lines.readline() if file.suffix == ".jsonl" else lines.read())
    except (OSError, ValueError):
        return False
    row = rows[0] if isinstance(rows, list) and rows else rows
    return isinstance(row, dict) and (is_conversational(row) or is_conversational_from_value(row))


def put_training_data(
    made: Conversion, found: Sequence[Dataset], source: ForeignConfig, key: str
) -> list[Dataset]:
    """Set what is trained on, and return it: one dataset, or a mixture of all that are read as the first is."""
    if not found:
        return []
    first = found[0]
    form = first.options, first.conversational
    # Reversed: of several entries with one path the first is kept.
    alike = {item.path: item for item in reversed(found) if (item.options, item.conversational) == form}
    kept = [item for item in found if alike.get(item.path) is item]
    for name, value in first.options.items():
        made.put(f"data.{name}", value)
    if left := [item.path for item in found if not any(item is one for one in kept)]:
        why = f"not {', '.join(left)}: the sources of data.mixture are read with the same keys, and once each"
        made.lose(source, key, why)
    if len(kept) == 1:
        made.put("data.train", first.path)
    elif any(item.weight for item in kept):
        made.put("data.mixture", {item.path: item.weight or 1.0 for item in kept})
    else:
        made.put("data.mixture", [item.path for item in kept])
    return kept


def put_evaluation_data(
    made: Conversion, found: Sequence[Dataset], source: ForeignConfig, key: str, trained_on: Sequence[Dataset]
) -> None:
    """Set what is evaluated on: one file that is read as the training data is."""
    if not found:
        return
    first = found[0]
    on_hub = first.options.get("format") == "hub"
    options = dict(trained_on[0].options) if trained_on else {}
    if on_hub:
        options["split"] = split = first.options.setdefault("split", "train")
    if len(found) > 1 or first.options != options:
        made.lose(
            source,
            key,
            "a recipe evaluates on one dataset, read with the keys of the training data: set data.eval",
        )
        return
    if on_hub:
        made.put("data.eval_split", split)
    if not on_hub or not trained_on or first.path != trained_on[0].path:
        made.put("data.eval", first.path)


def put_streaming(made: Conversion, source: ForeignConfig, key: str) -> None:
    """Read the training data while training, if key `key` asks for it and a recipe can."""
    if not source.take(key, False):
        return
    data = made.get("data") or {}
    path = str(data.get("train", ""))
    if not (data.get("format") == "hub" or path.endswith((".jsonl", ".parquet"))):
        made.lose(source, key, "a recipe streams one dataset: a jsonl or parquet file, or one of the Hub")
    elif source.values.get("max_steps", -1) < 1:
        made.lose(
            source, key, "a stream has no known length: set training.max_steps, and data.streaming: true"
        )
    elif data.get("eval_fraction"):
        made.lose(
            source, key, "a stream holds out rows by their number: set data.streaming and data.eval_rows"
        )
    else:
        made.put("data.streaming", True)


def messages_of(column: str, role: str, content: str, roles: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of `data` for conversations: nothing for those that are read as they are."""
    if (column, role, content) == ("messages", "role", "content") and not roles:
        return {}
    if (column, role, content) == ("conversations", "from", "value") and not roles:
        return {}
    wanted = {"column": column, "role": role, "content": content, "roles": dict(roles)}
    return {"messages": {name: value for name, value in wanted.items() if value}}
