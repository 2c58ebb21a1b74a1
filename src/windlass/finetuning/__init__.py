"""Trainers for one kind of task, on `Trainer`."""
