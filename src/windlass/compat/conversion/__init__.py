"""Configurations of other programs, as recipes of Windlass."""
