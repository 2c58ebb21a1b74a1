"""The experiment trackers, one file each; `callbacks/tracker_registry.py` lists them by name."""
