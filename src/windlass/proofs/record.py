"""The record of proofs: what a layout was compared for, and what came of it. Runs look up their layout here.

One file for each proof, in the folder `proofs` of Windlass's own files of the user.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import __version__
from windlass.core.errors import ModelError
from windlass.core.locations import home_folder
from windlass.core.optional import version_of
from windlass.core.whole_file import MAX_BYTES, read_json, write_whole
from windlass.proofs.small_config import AxisLayout, check_kinds, shrink

if TYPE_CHECKING:
    from windlass.config.arguments import TrainingArguments

SCHEMA = "windlass-prove/1"
_LIBRARIES = ("torch", "transformers")
# Options of LoRA that choose its sizes, places and first values alone. A proof has rank 2 on all linear layers.
_OF_SIZES = frozenset(
    (
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "peft_version",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    )
)


def check_adapter(config: Any) -> None:
    """Raise ModelError unless an adapter of peft with this configuration computes as that of a proof, plain LoRA."""
    kind, other = type(config).__name__, list[str]()
    if kind == "LoraConfig":
        plain = {name: value for name, value in vars(type(config)()).items() if name not in _OF_SIZES}
        other = sorted(name for name, value in plain.items() if getattr(config, name, value) != value)
    if kind != "LoraConfig" or other:
        what = f"a {kind}{' with ' * bool(other)}{', '.join(other)}"
        raise ModelError(f"of adapters only plain LoRA is proven, and this one is {what}")


def arguments_that_matter(
    args: TrainingArguments,
    adapter: bool = False,
    positions: bool = False,
    pipeline: tuple[str, int] = ("1F1B", 1),
    recompute: bool = False,
) -> dict[str, Any]:
    """The arguments of a run on which it depends what a layout computes: names -> plain values.

    Args:
        adapter: only an adapter is trained.
        positions: ranks that divide layers divide the positions between them; see `DistPlan`.
        pipeline: the schedule of a pipeline, and the stages of each of its ranks.
        recompute: the settings of FSDP ask for it, which arguments have too.
    """
    smoothing: float = args.label_smoothing_factor
    facts = {
        "smoothing": smoothing > 0,
        "recompute": recompute or bool(args.gradient_checkpointing),
        "clips": bool(args.max_grad_norm),
        "adapter": adapter,
        "positions": positions,
        "pipeline": None if pipeline == ("1F1B", 1) else list(pipeline),
        # Of fine-tuning, whose arguments have them.
        "tuning": hasattr(args, "completion_only_loss"),
        "loss": getattr(args, "loss_type", None),
        "joined": bool(getattr(args, "joins_rows", False)),
    }
    return {name: value for name, value in facts.items() if value not in (False, None, "nll")}


@dataclass(frozen=True, slots=True)
class Claim:
    """That a model of this kind trains on a layout as on one process."""

    config: dict[str, Any]  # of the small model in place of the large one
    layout: AxisLayout  # the layout that is tried in place of the real one
    facts: dict[str, Any]  # `arguments_that_matter`

    @classmethod
    def of(cls, config: Any, layout: AxisLayout, facts: dict[str, Any]) -> Claim:
        """The claim for a model with this configuration of transformers. Raises ModelError if it cannot be shrunk."""
        tried = layout.reduced()
        small = shrink(config.to_dict(), config.attribute_map, tried, facts.get("pipeline", (None, 1))[1])
        check_kinds(config, small)
        return cls(small, tried, facts)

    def key(self) -> str:
        """A hash of the claim and of the versions that it is made for."""
        said = {
            "config": self.config,
            "layout": str(self.layout),
            "facts": self.facts,
            "versions": versions(),
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def versions() -> dict[str, str]:
    """The versions of what computes."""
    libraries = {name: version_of(name) or "not installed" for name in _LIBRARIES}
    return {"windlass": __version__, "python": platform.python_version(), **libraries}


def record_path(claim: Claim) -> Path:
    """The file of a proof, which exists once the claim was tried."""
    return home_folder(os.environ) / "proofs" / f"{claim.key()[:32]}.json"


def write_record(claim: Claim, outcome: Mapping[str, Any]) -> Path:
    """Write what came of a claim. Raises OSError if the folder cannot be written."""
    path = record_path(claim)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(outcome, indent=1))
    return path


def find_record(claim: Claim) -> dict[str, Any] | None:
    """What came of a claim; None if it was not tried, or nothing can be read."""
    found = read_json(record_path(claim), MAX_BYTES)
    # A file is named by a part of the key.
    is_record = isinstance(found, dict) and found.get("schema") == SCHEMA and found.get("key") == claim.key()
    return found if is_record else None


def describe(claim: Claim, layout: AxisLayout, command: str) -> tuple[bool, str]:
    """Whether the layout of a run is proven, and the line that says so. `command` proves it."""
    found = find_record(claim)
    if found is None:
        return False, f"layout {layout}: not proven equal to one process; prove it with: {command}"
    if found["proven"]:
        return True, f"layout {layout}: proven on {found['date']}"
    # A layout that failed, as where the machine ran out of memory, was compared with nothing.
    was_compared = found.get("status", "differs") == "differs"
    what = (
        "differs from one process, as found" if was_compared else "not proven equal to one process, as tried"
    )
    return False, f"layout {layout}: {what} on {found['date']}: {found['difference']}"
