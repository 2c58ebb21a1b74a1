"""What is not built of optimizers, trackers, methods and arguments that scripts know, and why."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.config.enums import LoggerType

REPORT = "report"  # in `report_to`: a page and a picture of the run, beside trackers
_WRITTEN = "metrics.jsonl is always written, and report_to='report' adds report.html"
TRACKER_NOTE = f"is not built; {_WRITTEN}; a callback or a GeneralTracker of your own can send logs on"

PROJECTING_OPTIMIZERS = (
    "galore_adamw",
    "galore_adafactor",
    "galore_adamw_layerwise",
    "galore_adafactor_layerwise",
    "galore_adamw_8bit",
    "galore_adamw_8bit_layerwise",
    "apollo_adamw",
    "apollo_adamw_layerwise",
)
IN_BACKWARD_OPTIMIZERS = (
    "lomo",
    "adalomo",
    *(name for name in PROJECTING_OPTIMIZERS if name.endswith("_layerwise")),
)
OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adafactor", "sgd", "adagrad",
    "rmsprop", "muon", "lion_32bit", "ademamix",
    "stable_adamw", "grokadamw", "adamw_anyprecision", "schedule_free_adamw", "schedule_free_radam",
    "schedule_free_sgd", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit",
    "paged_adamw_8bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "ademamix_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit", "lomo", "adalomo",
    *PROJECTING_OPTIMIZERS,
)  # fmt: skip
GONE_OPTIMIZERS = {
    "adamw_hf": "is gone; use adamw_torch",
    "adamw_apex_fused": "is gone; use adamw_torch_fused",
}
# Part of a name -> end of the sentence "NAME is not built yet".
OPTIMIZER_ADVICE = {
    "npu": " (it needs torch_npu, on whose devices Windlass does not train); use adamw_torch_fused",
    **dict.fromkeys(("galore", "lomo"), "; adafactor keeps the smallest state of those that are"),
}
TRACKERS = tuple(sorted(kind.value for kind in LoggerType if kind is not LoggerType.ALL))
UNBUILT_TRACKERS = ("azure_ml", "codecarbon", "dagshub", "flyte", "kubeflow", "neptune")


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
            yield name, TRACKER_NOTE
        elif name not in (*TRACKERS, REPORT, "all"):
            yield name, f"is not a tracker; known names: all, none, {REPORT}, {', '.join(TRACKERS)}"


ACCELERATOR_REFUSED = {
    "megatron_lm_plugin": "Megatron-LM is not built; shard the model with fsdp_plugin",
    "torch_tp_plugin": "tensor parallelism is not built; a tp_size of 1 is accepted",
}
