"""What is not built of optimizers, trackers, methods and arguments that scripts know, and why."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.config.enums import LoggerType, OptimizerNames
from windlass.config.nearest import did_you_mean

REPORT = "report"  # in `report_to`: a page and a picture of the run, beside trackers
_WRITTEN = "metrics.jsonl is always written, and report_to='report' adds report.html"
TRACKER_NOTE = (
    f"is not built; {_WRITTEN}; a GeneralTracker of your own sends logs on with three methods (tracker, "
    "store_init_configuration, log): pass it in a TrackingCallback"
)

# All that have a name but for one, which needs devices on which Windlass does not train (`OPTIMIZER_ADVICE`).
OPTIMIZERS = tuple(str(name) for name in OptimizerNames if name is not OptimizerNames.ADAMW_TORCH_NPU_FUSED)
PROJECTING_OPTIMIZERS = tuple(name for name in OPTIMIZERS if name.startswith(("galore_", "apollo_")))
IN_BACKWARD_OPTIMIZERS = ("lomo", "adalomo", *(name for name in OPTIMIZERS if name.endswith("_layerwise")))
GONE_OPTIMIZERS = {
    "adamw_hf": "is gone; use adamw_torch",
    "adamw_apex_fused": "is gone; use adamw_torch_fused",
}
# Part of a name -> end of the sentence "NAME is not built yet".
OPTIMIZER_ADVICE = {
    "npu": " (it needs torch_npu, on whose devices Windlass does not train); use adamw_torch_fused",
    **dict.fromkeys(("galore", "lomo"), "; adafactor keeps the smallest state of those that are"),
}
_OTHER_TRACKERS = ("azure_ml", "codecarbon", "dagshub", "neptune")  # that accelerate does not have
TRACKERS = tuple(
    sorted([*(kind.value for kind in LoggerType if kind is not LoggerType.ALL), *_OTHER_TRACKERS])
)
# Name -> why logs cannot be sent to it by its name, and what to do instead.
UNBUILT_TRACKERS = dict.fromkeys(("flyte", "kubeflow"), TRACKER_NOTE)


def unbuilt_optimizer(name: str) -> str | None:
    """Why optimizer `name` cannot be used; None if it can."""
    if name in OPTIMIZERS:
        return None
    advice = next((note for start, note in OPTIMIZER_ADVICE.items() if start in name), "")
    return f"is not built yet{advice or '; use one of ' + ', '.join(OPTIMIZERS)}"


def unbuilt_trackers(report_to: list[str]) -> Iterator[tuple[str, str]]:
    """Each name of `report_to` that cannot be reported to, and why."""
    for name in report_to:
        if name in UNBUILT_TRACKERS:
            yield name, UNBUILT_TRACKERS[name]
        elif name not in (*TRACKERS, REPORT, "all"):
            known = ("all", "none", REPORT, *TRACKERS)
            yield name, f"is not a tracker; known names: {', '.join(known)}{did_you_mean(name, known)}"


ACCELERATOR_REFUSED = {
    "megatron_lm_plugin": "Megatron-LM is not built; shard the model with fsdp_plugin",
    "torch_tp_plugin": "a tp_size of 1 is accepted; parallelism_config sets others",
}
