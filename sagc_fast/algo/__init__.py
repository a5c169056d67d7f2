"""The algorithms as pure functions: rewards in, advantages, filters and one policy loss out.

``config`` is standard library only; the other modules import torch.
"""
