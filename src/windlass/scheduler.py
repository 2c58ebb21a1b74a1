"""Re-export of the old library (`windlass.accelerator.prepared_schedule`)."""

from windlass.accelerator.prepared_schedule import PreparedSchedule

AcceleratedScheduler = PreparedSchedule
