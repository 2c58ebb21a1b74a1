"""Floor 1: what a user may set, as pure data. Nothing here imports torch when it is imported."""
