"""A model of language in use: text goes in, and text or its likelihood comes out.

Programs are compiled for a few lengths only: texts are padded to the next power of two. Attention is causal, so what
follows a text changes nothing before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.models.protocol import Params, find_model
from diloco_jax.training.models.variables import Variables

PIECE = 16  # tokens that are written at once, at most
LENGTH_MIN = 32  # tokens, of a program
ROWS_MAX, LOGITS_MAX = 16, 1 << 28  # texts of one call, and numbers that it may hold (1 GiB)
UNFINISHED = "\N{REPLACEMENT CHARACTER}"

Row = tuple[Sequence[int], Sequence[int]]  # ids that are given, and ids whose likelihood is asked


class Writing(NamedTuple):
    """The way a model chooses the tokens that it writes."""

    temperature: float = 0.0  # 0 takes the likeliest token, 1 draws as the model says
    top_p: float = 1.0  # draws are from the likeliest tokens that together have this probability
    seed: int = 0


class Language:
    """The model of a run on one CPU device, with its tokenizer; ValueError if it cannot be loaded or has no text."""

    def __init__(self, config: RunConfig, parameters: Mapping[str, np.ndarray]) -> None:
        evaluator = Evaluator(config)
        if evaluator.tokenizer is None:
            raise ValueError(
                "nothing says how the ids that the run was trained on become text; with data.format tokens, name the "
                "folder of their tokenizer.json in data.tokenizer"
            )
        if not callable(getattr(find_model(config.model.module), "generate", None)):
            raise ValueError(
                f"model.module '{config.model.module}' has no method `generate`, with which a model writes; give it "
                "one like that of diloco_jax.training.models.decoder:Decoder"
            )
        tokenizer = self.tokenizer = evaluator.tokenizer
        self.context = config.train.seq_len  # what it was trained on
        self._piece = piece = max(1, min(PIECE, self.context // 4))
        self._placed = evaluator.place(parameters)

        def score(params: Params, other: Variables, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            model: Any = evaluator.model(params, other)
            said = jax.nn.log_softmax(model(tokens[:, :-1])[..., : tokenizer.vocab_size])
            asked = tokens[:, 1:]
            return jnp.take_along_axis(said, asked[..., None], axis=-1)[..., 0], jnp.argmax(said, axis=-1) == asked

        def write(
            params: Params, other: Variables, tokens: jax.Array, length: int, key: jax.Array, how: Writing
        ) -> Any:
            model: Any = evaluator.model(params, other)
            options = {"temperature": how.temperature, "top_p": how.top_p, "ids": tokenizer.vocab_size}
            return model.generate(tokens, piece, key, length=length, context=self.context, **options)

        self._score, self._write = jax.jit(score), jax.jit(write, static_argnums=5)

    def write(self, prompt: str, count: int, how: Writing) -> Iterator[str]:
        """Continue a text by `count` tokens, or until it ends; yield what was written, piece by piece."""
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise ValueError("the prompt has no token; give it some text")
        told, end, stop = self.tokenizer.decode(ids), self.tokenizer.end, len(ids) + count
        while len(ids) < stop and (end is None or end != ids[-1]):
            kept = ids[-max(1, self.context - self._piece) :]
            tokens = np.zeros(self._padded(len(kept)), np.int32)
            tokens[: len(kept)] = kept
            key = jax.random.fold_in(jax.random.key(how.seed), len(ids))
            new = np.asarray(self._write(*self._placed, tokens, len(kept), key, how._replace(seed=0))).tolist()
            ids += new[: new.index(end) + 1] if end in new else new
            text = self.tokenizer.decode([id for id in ids[:stop] if id != end])
            if len(ids) >= stop or not text.endswith(UNFINISHED):  # a character of several bytes
                yield text[len(told) :]
                told = text

    def likelihoods(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Compute for each row the log-likelihood in nats of its second part, and whether it is what is likeliest."""
        if (longest := max((len(asked) for _, asked in rows), default=0)) > self.context:
            raise ValueError(
                f"{longest} tokens are to be judged at once; the model sees {self.context} (train.seq_len)"
            )
        texts = [np.asarray([*given, *asked][-self.context - 1 :], np.int32) for given, asked in rows]
        order = sorted(range(len(rows)), key=lambda row: -len(texts[row]))
        found = [(0.0, True)] * len(rows)
        while order:
            length = self._padded(len(texts[order[0]]) - 1)
            size = max(1, min(ROWS_MAX, LOGITS_MAX // (length * self.tokenizer.vocab_size)))
            now, order = order[:size], order[size:]
            batch = np.zeros((size, length + 1), np.int32)
            for place, row in enumerate(now):
                batch[place, : len(texts[row])] = texts[row]
            said, likeliest = map(np.asarray, self._score(*self._placed, batch))
            for place, row in enumerate(now):
                asked = slice(len(texts[row]) - 1 - len(rows[row][1]), len(texts[row]) - 1)
                found[row] = float(said[place, asked].sum(dtype=np.float64)), bool(likeliest[place, asked].all())
        return found

    def _padded(self, length: int) -> int:
        """Return the length of the program for texts of this length."""
        return min(self.context, max(LENGTH_MIN, 1 << (length - 1).bit_length()))
