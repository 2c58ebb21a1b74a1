"""Names that scripts import from here (`windlass.accelerator.schedule`)."""

from windlass.accelerator.schedule import PreparedSchedule as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
