"""A reader of checkpoints written from `docs/checkpoints.md` alone: nothing of Windlass is imported."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


class PlainReader:
    """One checkpoint, verified when it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        body = {key: value for key, value in self.manifest.items() if key != "sha256"}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == self.manifest["sha256"]
        assert (self.manifest["format"], self.manifest["version"]) == ("windlass-checkpoint", 1)
        assert folder.name == f"checkpoint-{self.manifest['step']}"
        for name, said in self.manifest["files"].items():
            content = (folder / name).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (said["size"], said["sha256"]), name

    def has(self, name: str) -> bool:
        return name in self.manifest["files"]

    def state(self, name: str) -> Any:
        """The state `name`: its tree with the tensors in their places."""
        tensors = self._tensors(f"{name}.safetensors") if self.has(f"{name}.safetensors") else {}
        parts = self.parts(name) if self.has(f"{name}.parts.json") else {}
        return _valued(json.loads((self.folder / f"{name}.json").read_text("utf-8")), tensors, parts)

    def log_history(self) -> list[dict[str, Any]]:
        """All rows, the oldest first."""
        newest = self.state("trainer_state")["log_history"]
        if not self.has("log_history.json"):
            return newest  # type: ignore[no-any-return]
        index, rows = self.state("log_history"), []
        for segment in index["segments"]:
            assert self.has(segment["file"])
            lines = (self.folder / segment["file"]).read_text("utf-8").splitlines()
            assert len(lines) == segment["rows"]
            rows += [_valued(json.loads(line), {}, {}) for line in lines]
        assert len(rows) + len(newest) == index["rows"]
        return rows + newest

    def weights(self) -> dict[str, Tensor]:
        """Every name of the model's state dict, from one file or from the parts of ranks."""
        if self.has("model.parts.json"):
            return self.parts("model")
        found = self._tensors("model.safetensors")
        with safe_open(self.folder / "model.safetensors", "pt") as file:
            aliases = json.loads(file.metadata().get("windlass.aliases", "{}"))
        return found | {alias: found[stored] for alias, stored in aliases.items()}

    def parts(self, name: str) -> dict[str, Tensor]:
        index = json.loads((self.folder / f"{name}.parts.json").read_text("utf-8"))
        ranks = {
            rank: self._tensors(f"{name}-rank-{rank:05}.safetensors")
            for rank in range(index["ranks"])
            if self.has(f"{name}-rank-{rank:05}.safetensors")
        }
        found = {}
        for tensor, at in index["tensors"].items():
            parts = sorted(at["parts"], key=lambda part: part[1])
            rows = [ranks[rank][tensor] for rank, _, _ in parts]
            found[tensor] = torch.cat(rows, at["dim"]) if len(rows) > 1 else rows[0]
            assert list(found[tensor].shape) == at["shape"], tensor
        return found | {alias: found[stored] for alias, stored in index["aliases"].items()}

    def _tensors(self, file: str) -> dict[str, Tensor]:
        with safe_open(self.folder / file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _valued(value: Any, tensors: dict[str, Tensor], parts: dict[str, Tensor]) -> Any:
    def inner(value: Any) -> Any:
        return _valued(value, tensors, parts)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "windlass.part" in value:
        return parts[value["windlass.part"]]
    if "$tensor" in value:
        tensor = tensors[value["$tensor"]]
        return torch.view_as_complex(tensor) if value.get("complex") else tensor
    if "$array" in value:
        array = tensors[value["$array"]].numpy()
        return array[()] if value.get("scalar") else array
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(inner(value["$tuple"]))
    if "$map" in value:
        return {key: inner(item) for key, item in value["$map"]}
    return {key: inner(item) for key, item in value.items()}
