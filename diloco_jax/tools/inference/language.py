"""Use of a language model: it continues texts and computes their likelihood.

Programs are compiled only for a few lengths, so texts are padded to the next power of two. Padding after a text does
not change its results, because attention is causal.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.runtime.model.evaluation import RunModel
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.inference.prompt import Prompt, prompt_of
from diloco_jax.training.convert.companions import stop_ids
from diloco_jax.training.data.corpus import tokenizer_of
from diloco_jax.training.models.protocol import find_model
from diloco_jax.training.state import Batch, Params, Variables

# The most tokens that are written at once.
PIECE = 16
# The least length of a program, in tokens.
LENGTH_MIN = 32
# The most texts of one call, and the most logits (1 GiB).
ROWS_MAX, LOGITS_MAX = 16, 1 << 28
UNFINISHED = "\N{REPLACEMENT CHARACTER}"

# The ids of a context, and the ids whose likelihood is wanted.
Row = tuple[Sequence[int], Sequence[int]]


class Writing(NamedTuple):
    """The options for drawing tokens."""

    # 0 takes the likeliest token; 1 draws with the model's probabilities.
    temperature: float = 0.0
    # Tokens are drawn from the likeliest ones that together have this probability.
    top_p: float = 1.0
    seed: int = 0


class Language:
    """The model of a run on one CPU device, with its tokenizer.

    Raises:
      ValueError: the model cannot be loaded or cannot write, or its tokenizer is unknown.
    """

    def __init__(self, config: RunConfig, parameters: Mapping[str, np.ndarray]) -> None:
        tokenizer = tokenizer_of(config.data)
        if tokenizer is None:
            raise ValueError(
                "the tokenizer of the run's data is unknown; with data.format tokens, name the folder of its "
                "tokenizer.json in data.tokenizer"
            )
        if not callable(getattr(find_model(config.model.module), "generate", None)):
            raise ValueError(
                f"model.module '{config.model.module}' has no method `generate`, which is needed to write text; "
                "add one like that of diloco_jax.training.models.decoder:Decoder"
            )
        run_model, self.tokenizer = RunModel(config), tokenizer
        self._ends = stop_ids(config.model, config.data, tokenizer)
        # The model was trained on this length.
        self.context = config.train.seq_len
        self._config = config
        self._piece = piece = max(1, min(PIECE, self.context // 4))
        self._placed = run_model.place(parameters)

        def score(params: Params, other: Variables, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            model: Any = run_model.model(params, other)
            # Ids that only the model has are included, because its loss includes them too.
            said = jax.nn.log_softmax(model(tokens[:, :-1]))
            asked = tokens[:, 1:]
            return jnp.take_along_axis(said, asked[..., None], axis=-1)[..., 0], jnp.argmax(said, axis=-1) == asked

        def write(
            params: Params,
            other: Variables,
            tokens: jax.Array,
            length: int,
            images: Batch,
            key: jax.Array,
            how: Writing,
        ) -> Any:
            model: Any = run_model.model(params, other)
            options: dict[str, Any] = {"temperature": how.temperature, "top_p": how.top_p, "ids": tokenizer.vocab_size}
            if images:
                options["arrays"] = images
            return model.generate(tokens, piece, key, length=length, context=self.context, **options)

        self._score, self._write = jax.jit(score), jax.jit(write, static_argnums=6)

    def write(self, prompt: str, count: int, how: Writing, files: Sequence[Path] = ()) -> Iterator[str]:
        """Continue a text by `count` tokens, or until a token that ends it; yield the new text piece by piece.

        Args:
          prompt: the text; with images as in `prompt_of`.
          count: the most tokens.
          how: options for drawing them.
          files: images in the prompt.

        Raises:
          ValueError: as `prompt_of`; or the prompt has no token, or is longer than the model's context with its images.
        """
        ids, arrays = prompt_of(self._config, self.tokenizer, prompt, files) if files else self._plain(prompt)
        # Texts are cut at their beginning, but images would be lost there.
        if files and len(ids) + count > (limit := self.context - self._piece + 1):
            raise ValueError(
                f"the prompt has {len(ids)} tokens with its images, and {count} more are wanted, but the model was "
                f"trained on {self.context} (train.seq_len), which leaves room for {limit}; ask for fewer --tokens, or "
                "shorten the prompt"
            )
        told, stop, ended = self.tokenizer.decode(ids), len(ids) + count, False
        while len(ids) < stop and not ended:
            kept = ids[-max(1, self.context - self._piece) :]
            tokens = np.zeros(self._padded(len(kept)), np.int32)
            tokens[: len(kept)] = kept
            key = jax.random.fold_in(jax.random.key(how.seed), len(ids))
            new = np.asarray(self._write(*self._placed, tokens, len(kept), arrays, key, how._replace(seed=0))).tolist()
            last = next((place for place, id in enumerate(new) if id in self._ends), None)
            ids, ended = [*ids, *new[:last]], last is not None
            text = self.tokenizer.decode(ids[:stop])
            # A replacement character at the end means that a character still lacks bytes.
            if ended or len(ids) >= stop or not text.endswith(UNFINISHED):
                yield text[len(told) :]
                told = text

    def _plain(self, prompt: str) -> Prompt:
        if not (ids := self.tokenizer.encode(prompt)):
            raise ValueError("the prompt has no token; give it some text")
        return Prompt(ids, {})

    def likelihoods(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Return each row's log-likelihood of its second part in nats, and whether all its tokens are the likeliest."""
        if (longest := max((len(asked) for _, asked in rows), default=0)) > self.context:
            raise ValueError(f"a row has {longest} tokens to judge, but the model sees {self.context} (train.seq_len)")
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
