"""The experiment trackers, one file each; `callbacks/tracker_registry.py` knows them by name."""
