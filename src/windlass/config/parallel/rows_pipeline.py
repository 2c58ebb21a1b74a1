"""The settings of pipelines, beside their size."""

from __future__ import annotations

from windlass.config import kinds
from windlass.config.parallel.keys import Rows
from windlass.config.plan import SCHEDULES

_mesh = Rows("mesh")
PP_SCHEDULE = _mesh(
    "pp_schedule",
    kinds.choice(*map(str.lower, SCHEDULES)),
    "1f1b",
    "The order of forwards and backwards in a pipeline, by its name in torch.distributed.pipelining.",
)
PP_STAGES = _mesh(
    "pp_stages_per_process",
    kinds.positive,
    None,
    "Stages of the pipeline that each process computes; by default 2 with a schedule that needs several, else 1.",
)
PP_SPLIT_POINTS = _mesh(
    "pp_split_points",
    kinds.words,
    (),
    "Names of the modules with which the second and later stages begin; by default layers are shared out evenly.",
)
PIPELINE = tuple(_mesh)
