"""Memory, traffic and time of a run before it starts: one update of the real model on tensors without memory."""
