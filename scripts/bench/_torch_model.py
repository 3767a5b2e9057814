"""The model of the torchft replicas, for an environment that has PyTorch and not this package."""

import torch
from torch import nn


def make_model(vocab_size: int, dim: int, mlp_dim: int) -> nn.Sequential:
    """Return a model with the matrices of _paced_model.PacedModel."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(vocab_size, dim),
        nn.Linear(dim, mlp_dim, bias=False),
        nn.ReLU(),
        nn.Linear(mlp_dim, dim, bias=False),
        nn.Linear(dim, vocab_size, bias=False),
    )
