"""Models as users of Flax write them: a recurrent one, dropout, batch statistics, and one written in Linen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen, nnx

# A subprocess imports it from here: a real run's steps take as long as its environment sets.
from tests.runtime import paced as paced

Batch = Mapping[str, Any]
HERE = __name__


def cross_entropy(logits: Any, targets: Any) -> Any:
    """Mean over all tokens, in nats."""
    return -jnp.take_along_axis(nnx.log_softmax(logits), targets[..., None], axis=-1).mean()


class Language(nnx.Module):
    """Embedding, something between, and logits."""

    def __init__(self, vocab_size: int, dim: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab_size, dim, rngs=rngs)
        self.head = nnx.Linear(dim, vocab_size, rngs=rngs)

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Language:
        return cls(args["vocab_size"], args["dim"], rngs)

    def between(self, x: Any) -> Any:
        return x

    def loss(self, batch: Batch) -> tuple[Any, dict[str, Any]]:
        tokens = batch["tokens"]
        return cross_entropy(self.head(self.between(self.embed(tokens[:, :-1]))), tokens[:, 1:]), {}


class Recurrent(Language):
    """`nnx.RNN`, which holds a random stream for its carry, around a cell that holds one too."""

    def __init__(self, vocab_size: int, dim: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, dim, rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(dim, dim, rngs=rngs))

    def between(self, x: Any) -> Any:
        return self.rnn(x)


class Dropping(Language):
    """Dropout at two places, and attention whose mode nobody chose."""

    def __init__(self, vocab_size: int, dim: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, dim, rngs)
        self.before, self.after = nnx.Dropout(0.3, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, dim, dropout_rate=0.2, decode=False, rngs=rngs)

    def between(self, x: Any) -> Any:
        return self.after(x + self.attention(self.before(x), mask=nnx.make_causal_mask(x[..., 0])))


class Normalised(Language):
    """Batch statistics, and a counter that is a Python number at first."""

    def __init__(self, vocab_size: int, dim: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, dim, rngs)
        self.norm = nnx.BatchNorm(dim, momentum=0.9, rngs=rngs)
        self.calls = nnx.Variable(0)

    def between(self, x: Any) -> Any:
        self.calls.set_value(self.calls.get_value() + 1)
        x = self.norm(x)
        # The by-product is kept nowhere.
        self.normed = nnx.Intermediate(x)
        return x


class Everything(Language):
    """All of it in one model."""

    def __init__(self, vocab_size: int, dim: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, dim, rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(dim, dim, rngs=rngs), rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.norm = nnx.BatchNorm(dim, momentum=0.9, rngs=rngs)

    def between(self, x: Any) -> Any:
        return x + self.drop(self.norm(self.rnn(x)))


class LinenPart(linen.Module):
    """A Linen module with parameters, batch statistics and dropout."""

    dim: int

    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = linen.Dense(self.dim)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return linen.Dropout(0.2, deterministic=not train)(linen.relu(x))


class FromLinen(Language):
    """A Linen module inside, through the bridge."""

    def __init__(self, vocab_size: int, dim: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, dim, rngs)
        # Module.train and Module.eval set this attribute.
        self.deterministic = False
        self.part = nnx.bridge.ToNNX(LinenPart(dim), rngs=rngs)
        self.part.lazy_init(jnp.zeros((1, 1, dim)), train=False)

    def between(self, x: Any) -> Any:
        if self.deterministic:
            return x + self.part(x, train=False)
        return x + self.part(x, train=True, mutable=["batch_stats"])
