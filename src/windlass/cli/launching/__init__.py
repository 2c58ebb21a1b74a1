"""Start a script in several processes, and report why one of them failed."""
