"""Optimizers of torch that have a learning rate and options of their own."""

from __future__ import annotations

import torch

from windlass.optim.optimizers.options import recipe_of

sgd = recipe_of(torch.optim.SGD, momentum=float, dampening=float, nesterov=bool)
adagrad = recipe_of(torch.optim.Adagrad, lr_decay=float, eps=float)  # Duchi et al. 2011
rmsprop = recipe_of(  # Hinton, Coursera lecture 6e
    torch.optim.RMSprop, momentum=float, alpha=float, eps=float, centered=bool
)
# bitsandbytes' RMSprop in 32 bits is this formula, without momentum.
rmsprop_bnb = recipe_of(torch.optim.RMSprop, alpha=float, eps=float)
