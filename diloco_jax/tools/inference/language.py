"""Use of a language model: it continues texts and computes their likelihood.

Programs are compiled only for a few lengths, so texts are padded to the next power of two. Padding after a text does
not change its results, because attention is causal. `writer.py` continues texts.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.runtime.model.evaluation import RunModel
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.inference.prompt import prompt_of
from diloco_jax.tools.inference.writer import DeviceModel, Draft, Writer, Writing, padded, writer_of
from diloco_jax.training.convert.companions import stop_ids
from diloco_jax.training.data.corpus import tokenizer_of

# The most texts of one call, and the most logits (1 GiB).
ROWS_MAX, LOGITS_MAX = 16, 1 << 28
UNFINISHED = "\N{REPLACEMENT CHARACTER}"

# The ids of a context, and the ids whose likelihood is wanted.
Row = tuple[Sequence[int], Sequence[int]]


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
        writer = writer_of(config.model.module)
        run_model, self.tokenizer = RunModel(config), tokenizer
        # The model was trained on this length.
        self.context = config.train.seq_len
        self._config = config
        ends = stop_ids(config.model, config.data, tokenizer)
        self._held = DeviceModel(run_model, run_model.place(parameters))
        self._writer: Writer = writer(self._held, self.context, tokenizer.vocab_size, frozenset(ends))

        def score(variables: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            model: Any = self._held.model(variables)
            # Ids that only the model has are included, because its loss includes them too.
            said = jax.nn.log_softmax(model(tokens[:, :-1]))
            asked = tokens[:, 1:]
            return jnp.take_along_axis(said, asked[..., None], axis=-1)[..., 0], jnp.argmax(said, axis=-1) == asked

        self._score = jax.jit(score)

    def write(self, prompt: str | Sequence[int], count: int, how: Writing, files: Sequence[Path] = ()) -> Iterator[str]:
        """Continue a text by `count` tokens, or until a token that ends it; yield the new text piece by piece.

        Args:
          prompt: the text, with images as in `prompt_of`; or its token ids.
          count: the most tokens.
          how: options for drawing them.
          files: images in the prompt.

        Raises:
          ValueError: as `prompt_of`; or the prompt has no token, or is longer than the model's context with its images.
        """
        if files and isinstance(prompt, str):
            ids, arrays = prompt_of(self._config, self.tokenizer, prompt, files)
        else:
            ids, arrays = self._ids(prompt), {}
        # Texts are cut at their beginning, but images would be lost there. The last token is drawn, but not read.
        if files and len(ids) + count > (limit := self.context + 1):
            raise ValueError(
                f"the prompt has {len(ids)} tokens with its images, and {count} more are wanted, but the model was "
                f"trained on {self.context} (train.seq_len), which leaves room for {limit}; ask for fewer --tokens, or "
                "shorten the prompt"
            )
        draft = Draft(ids, len(ids) + count, how.seed)
        told = self.tokenizer.decode(ids)
        for _ in self._writer.write([draft], how.drawing, arrays):
            text = self.tokenizer.decode(draft.ids)
            # A replacement character at the end means that a character still lacks bytes.
            if draft.ended or not text.endswith(UNFINISHED):
                yield text[len(told) :]
                told = text

    def write_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        count: int,
        how: Writing,
        until: Sequence[str] = (),
    ) -> list[str]:
        """Continue several texts; return the new text of each, which is the one that `write` writes for it alone.

        Args:
          prompts: texts or their token ids; equal prompts get equal texts.
          count: the most tokens of each text.
          how: options for drawing them.
          until: strings that end a text; the text includes the first one, and perhaps a few tokens more.

        Raises:
          ValueError: a prompt has no token.
        """
        drafts = [Draft(ids, len(ids) + count, how.seed) for ids in map(self._ids, prompts)]
        begun = [self.tokenizer.decode(draft.ids) for draft in drafts]
        # Texts of similar length are padded little.
        order = sorted(range(len(drafts)), key=lambda row: -len(drafts[row].ids))
        for first in range(0, len(order), ROWS_MAX):
            rows = order[first : first + ROWS_MAX]
            for _ in self._writer.write([drafts[row] for row in rows], how.drawing):
                for row in rows if until else ():
                    new = self.tokenizer.decode(drafts[row].ids)[len(begun[row]) :]
                    drafts[row].ended |= any(stop in new for stop in until)
        return [self.tokenizer.decode(draft.ids)[len(text) :] for draft, text in zip(drafts, begun, strict=True)]

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("the prompt has no token; give it some text")
        return ids

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
            said, likeliest = map(np.asarray, self._score(self._held.variables, batch))
            for place, row in enumerate(now):
                asked = slice(len(texts[row]) - 1 - len(rows[row][1]), len(texts[row]) - 1)
                found[row] = float(said[place, asked].sum(dtype=np.float64)), bool(likeliest[place, asked].all())
        return found

    def _padded(self, length: int) -> int:
        """Return the length of the program for texts of this length."""
        return padded(length, self.context)
