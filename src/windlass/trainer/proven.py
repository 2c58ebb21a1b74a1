"""Whether the layout of a run was compared with one process by `windlass prove`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.config.arguments import TrainingArguments
from windlass.config.plan import DistPlan
from windlass.core.errors import ModelError
from windlass.core.logs import get_job_logger
from windlass.core.mesh import Axis, Mesh
from windlass.dist.gang import Gang
from windlass.proofs.layout import AxisLayout
from windlass.proofs.record import Claim, arguments_that_matter, describe

logger = get_job_logger(__name__)

# Names of the axes where layouts are written.
_NAMES: dict[Axis, str] = {
    "replicate": "dp",
    "shard": "dp_shard",
    "expert": "ep",
    "tensor": "tp",
    "context": "cp",
    "sequence": "sp",
    "pipeline": "pp",
}
_OF_SAMPLES = ("dp", "dp_shard")


def layout_of(mesh: Mesh) -> AxisLayout:
    """The axes of a run as `windlass prove` names them."""
    return AxisLayout.of({name: mesh.along(axis) for axis, name in _NAMES.items()})


def report_proof(args: TrainingArguments, model: Any, all_ranks: Gang, dist: DistPlan) -> None:
    """Log on the main process whether the layout is proven for a model of this kind. Nothing is logged for a model that
    has no configuration of transformers, and for ranks that differ in their samples alone, unless it is proven.
    """
    if all_ranks.size == 1 or not all_ranks.world.is_main:
        return
    layout, config = layout_of(all_ranks.mesh), getattr(model, "config", None)
    if not layout.axes or dist.strategy == "deepspeed" or not hasattr(config, "attribute_map"):
        return
    divides = any(axis not in _OF_SAMPLES for axis in layout.axes)
    sizes = ",".join(f"{axis}={size}" for axis, size in layout.sizes)
    name = str(getattr(config, "_name_or_path", ""))
    command = (
        f"windlass prove {name if name and Path(name).is_dir() else 'RECIPE_OR_CONFIG.JSON'} --layout {sizes}"
        f"{' parallel.tp_sequence_parallel=true' * dist.tensor_positions}"
    )
    try:
        adapted = hasattr(model, "peft_config")
        facts = arguments_that_matter(args, adapted, dist.tensor_positions)
        proven, line = describe(Claim.of(config, layout, facts), layout, command)
    except ModelError as error:
        proven, line = False, f"layout {layout}: not proven equal to one process: {error}"
    if proven:
        logger.info("%s", line)
    elif divides:
        logger.warning("%s", line)
