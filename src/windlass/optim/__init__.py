"""Optimizers by name, which parameters decay, and the learning rate of every update."""
