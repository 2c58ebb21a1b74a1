"""Optimizers of torch that have a learning rate and options of their own."""

from __future__ import annotations

import torch

from windlass.optim.optimizers.options import recipe_of

sgd = recipe_of(torch.optim.SGD, "momentum", "dampening", "nesterov")
adagrad = recipe_of(torch.optim.Adagrad, "lr_decay", "eps")  # Duchi et al. 2011
# Hinton, Coursera lecture 6e
rmsprop = recipe_of(torch.optim.RMSprop, "momentum", "alpha", "eps", "centered")
# bitsandbytes' RMSprop in 32 bits is this formula, without momentum.
rmsprop_bnb = recipe_of(torch.optim.RMSprop, "alpha", "eps")
