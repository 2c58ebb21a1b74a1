"""A plan as text, for the machines that a cluster gives."""

from __future__ import annotations

import dataclasses
import json

from windlass.config.launch import LaunchPlan


def to_text(plan: LaunchPlan) -> str:
    """JSON that `from_text` reads back on another machine, where Windlass is installed too.

    Settings are left out: `WINDLASS_PARALLEL`, in the plan's environment, carries them to the processes.
    """
    kept = [item.name for item in dataclasses.fields(plan) if item.name != "settings"]
    return json.dumps({name: getattr(plan, name) for name in kept}, default=dict)


def from_text(text: str) -> LaunchPlan:
    """The plan of `to_text`."""
    content = json.loads(text)
    return LaunchPlan(**{**content, "arguments": tuple(content["arguments"])})
