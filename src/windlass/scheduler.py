"""Names that scripts import from here (`windlass.accelerator.prepared_schedule`)."""

from windlass.accelerator.prepared_schedule import PreparedSchedule as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
