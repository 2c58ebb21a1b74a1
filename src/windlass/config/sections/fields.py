"""All fields of `TrainingArguments`, for what reads them below it."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config.sections.compute import ComputeSection
from windlass.config.sections.evaluation import EvaluationSection
from windlass.config.sections.optimisation import OptimisationSection
from windlass.config.sections.reporting import ReportingSection
from windlass.config.sections.running import RunningSection
from windlass.config.sections.saving import SavingSection


@dataclass(repr=False)
class Fields(
    # A dataclass has the fields of its last base first, so the sections are in reverse order: `output_dir` is first.
    RunningSection,
    SavingSection,
    EvaluationSection,
    ReportingSection,
    ComputeSection,
    OptimisationSection,
):
    """The sections together."""
