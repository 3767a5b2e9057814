"""The model of the torchft replicas: imported in an environment that has PyTorch and nothing of ours."""

import torch
from torch import nn


def make_model(vocab_size: int, dim: int, mlp_dim: int) -> nn.Sequential:
    """The same matrices as _paced_model.PacedModel has."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(vocab_size, dim),
        nn.Linear(dim, mlp_dim, bias=False),
        nn.ReLU(),
        nn.Linear(mlp_dim, dim, bias=False),
        nn.Linear(dim, vocab_size, bias=False),
    )
