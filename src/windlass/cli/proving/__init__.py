"""`windlass prove`: the processes that train a small model on a layout and on one process, and the comparison."""
