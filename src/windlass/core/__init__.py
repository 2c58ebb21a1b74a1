"""Floor 0: what every other room may lean on. Imports nothing of Windlass above itself."""
