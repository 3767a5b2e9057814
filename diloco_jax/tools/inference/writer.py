"""Continues texts by pieces of a few tokens, with the caches of the model or with its own method `generate`.

The caches stay on the device from the first token of a text to its last one. The model sees at most `context` tokens.
When a text has grown beyond that, it loses its oldest quarter, and the model reads the rest again as if the text began
there: it was trained on texts that begin, not on ones whose beginning is missing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diloco_jax.runtime.model.evaluation import RunModel
from diloco_jax.training.models.block import Caches
from diloco_jax.training.models.protocol import find_model
from diloco_jax.training.models.vocabulary import Drawing, draw
from diloco_jax.training.state import Params, Variables

# The most tokens that are written at once.
PIECE = 16
# The least length of a program, in tokens.
LENGTH_MIN = 32


class Writing(NamedTuple):
    """The options for writing, as in `Drawing`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def drawing(self) -> Drawing:
        return Drawing(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(slots=True)
class Draft:
    """A text that is being written."""

    ids: list[int]
    # The text ends when it has so many tokens.
    stop: int
    seed: int
    ended: bool = False
    # The first token that the model reads.
    start: int = 0

    @property
    def read(self) -> list[int]:
        return self.ids[self.start :]

    def add(self, new: Sequence[int], ends: frozenset[int]) -> None:
        """Add tokens up to the first one that ends the text."""
        last = next((place for place, id in enumerate(new) if id in ends), None)
        self.ids = [*self.ids, *new[:last]][: self.stop]
        self.ended = last is not None or len(self.ids) >= self.stop


def padded(length: int, limit: int, steps: int = 1) -> int:
    """Return the length of the program for texts of this length: a power of two, or with 2 `steps` also 1.5 times one.

    A program is never longer than `limit`.
    """
    power = max(LENGTH_MIN, 1 << (length - 1).bit_length())
    if steps == 2 and length <= power * 3 // 4:
        power = power * 3 // 4
    return min(limit, power)


class DeviceModel:
    """The one copy of a model's variables on the device, before and after they are cut into layers."""

    def __init__(self, run_model: RunModel, placed: tuple[Params, Variables]) -> None:
        self._run_model = run_model
        self._graphdef: Any = None
        self.variables: Any = placed

    def model(self, variables: Any) -> Any:
        """Build the model from `variables` within a program."""
        if self._graphdef is not None:
            return nnx.merge(self._graphdef, variables)
        return self._run_model.model(*variables)

    def unstack(self) -> None:
        """Store the variables as a step reads them."""
        if self._graphdef is None:
            model: Any = self._run_model.model(*self.variables)
            self.variables = None
            model.unstack()
            self._graphdef, self.variables = nnx.split(model)


class Writer(Protocol):
    """Continues texts."""

    def write(self, drafts: Sequence[Draft], how: Drawing, arrays: Mapping[str, Any] = ...) -> Iterator[None]:
        """Add tokens to all drafts that have not ended, until all have; yield after each piece.

        Args:
          drafts: texts; the caller may end one between two pieces.
          how: options for drawing tokens.
          arrays: images of the prompt, if there is one draft.
        """
        ...


class CachedWriter:
    """Writes with the caches of the built-in decoders (`Decoder.prefill` and `step`)."""

    def __init__(self, held: DeviceModel, context: int, ids: int, ends: frozenset[int]) -> None:
        self._held, self._context, self._ends = held, context, ends
        end_ids = np.asarray(sorted(ends), np.int32)

        def keys_of(seeds: jax.Array, lengths: jax.Array) -> jax.Array:
            # A key depends on the seed and the length of the text alone, so a text is the same in every batch.
            return jax.vmap(lambda seed, length: jax.random.fold_in(jax.random.key(seed), length))(seeds, lengths)

        @partial(jax.jit, static_argnames=("how", "size"))
        def begin(
            variables: Any, tokens: Any, starts: Any, lengths: Any, seeds: Any, arrays: Any, how: Drawing, size: int
        ) -> tuple[jax.Array, Caches]:
            model = held.model(variables)
            logits, caches = model.prefill(tokens, lengths, size=size, arrays=arrays)
            return draw(logits[:, :ids], keys_of(seeds, starts + lengths), how), caches

        @partial(jax.jit, static_argnames=("how", "size"), donate_argnames="caches")
        def proceed(
            variables: Any, caches: Caches, token: Any, starts: Any, ended: Any, seeds: Any, count: Any, how: Drawing,
            size: int,
        ) -> tuple[jax.Array, jax.Array, Caches]:  # fmt: skip
            model = held.model(variables)

            def add(state: tuple[Any, ...]) -> tuple[Any, ...]:
                number, token, ended, written, caches = state
                logits, caches = model.step(token, caches, size=size)
                token = draw(logits[:, :ids], keys_of(seeds, starts + caches.lengths), how)
                ended = ended | jnp.any(token[:, None] == end_ids[None], axis=1)
                return number + 1, token, ended, written.at[:, number].set(token), caches

            def continues(state: tuple[Any, ...]) -> jax.Array:
                return (state[0] < count) & ~jnp.all(state[2])

            first = (jnp.int32(0), token, ended, jnp.zeros((len(token), PIECE), jnp.int32), caches)
            _, token, _, written, caches = jax.lax.while_loop(continues, add, first)
            return token, written, caches

        self._begin, self._proceed = begin, proceed

    def write(self, drafts: Sequence[Draft], how: Drawing, arrays: Mapping[str, Any] = {}) -> Iterator[None]:
        """Add tokens to all drafts, as in `Writer`."""
        self._held.unstack()
        seeds = np.asarray([draft.seed for draft in drafts], np.uint32)
        longest = max(self._end(draft) for draft in drafts)
        size, state = padded(longest, self._context, steps=2), None
        while not all(draft.ended for draft in drafts):
            active = [draft for draft in drafts if not draft.ended]
            # Ended texts stay in the batch, but they must not grow out of the cache's numbers.
            if state is None or any(len(draft.read) > self._context for draft in active):
                state = self._read(drafts, seeds, how, size, arrays)
                yield
                continue
            token, caches, starts = state
            room = min(self._context - len(draft.read) + 1 for draft in active)
            left = max(draft.stop - len(draft.ids) for draft in active)
            count = min(PIECE, room, left)
            ended = np.asarray([draft.ended for draft in drafts])
            token, written, caches = self._proceed(
                self._held.variables, caches, token, starts, ended, seeds, np.int32(count), how=how, size=size
            )
            state = token, caches, starts
            self.caches = caches
            for draft, new in zip(drafts, np.asarray(written)[:, :count].tolist(), strict=True):
                if not draft.ended:
                    draft.add(new, self._ends)
            yield

    def _end(self, draft: Draft) -> int:
        """Return the most tokens of a draft that the model will see; the last token is drawn, but not read."""
        return min(self._context, draft.stop - 1)

    def _read(
        self, drafts: Sequence[Draft], seeds: np.ndarray, how: Drawing, size: int, arrays: Mapping[str, Any]
    ) -> tuple[jax.Array, Caches, np.ndarray]:
        """Read all drafts from their starts, and add the first token to each."""
        for draft in drafts:
            if len(draft.read) > self._context:
                draft.start = len(draft.ids) - max(1, self._context - self._context // 4)
        lengths = np.asarray([len(draft.read) for draft in drafts], np.int32)
        starts = np.asarray([draft.start for draft in drafts], np.int32)
        tokens = np.zeros((len(drafts), padded(int(lengths.max()), self._context)), np.int32)
        for row, draft in enumerate(drafts):
            tokens[row, : lengths[row]] = draft.read
        token, caches = self._begin(
            self._held.variables, tokens, starts, lengths, seeds, dict(arrays), how=how, size=size
        )
        for draft, new in zip(drafts, np.asarray(token)[:, None].tolist(), strict=True):
            if not draft.ended:
                draft.add(new, self._ends)
        return token, caches, starts


class OwnWriter:
    """Writes with a model's own method `generate`, which reads the whole text again for each piece."""

    def __init__(self, held: DeviceModel, context: int, ids: int, ends: frozenset[int]) -> None:
        self._held, self._context, self._ends = held, context, ends
        self._piece = piece = max(1, min(PIECE, context // 4))

        @partial(jax.jit, static_argnames="how")
        def write(variables: Any, tokens: Any, length: Any, key: Any, how: Drawing) -> jax.Array:
            # A method from before these options must not be asked for them.
            further = {name: value for name, value in (("top_k", how.top_k), ("min_p", how.min_p)) if value}
            options = {"temperature": how.temperature, "top_p": how.top_p, "ids": ids, **further}
            found: jax.Array = held.model(variables).generate(
                tokens, piece, key, length=length, context=context, **options
            )
            return found

        self._write = write

    def write(self, drafts: Sequence[Draft], how: Drawing, arrays: Mapping[str, Any] = {}) -> Iterator[None]:
        """Add tokens to all drafts, as in `Writer`; such a model reads no images."""
        while active := [draft for draft in drafts if not draft.ended]:
            for draft in active:
                kept = draft.ids[-max(1, self._context - self._piece) :]
                tokens = np.zeros(padded(len(kept), self._context), np.int32)
                tokens[: len(kept)] = kept
                key = jax.random.fold_in(jax.random.key(draft.seed), len(draft.ids))
                draft.add(
                    np.asarray(self._write(self._held.variables, tokens, len(kept), key, how)).tolist(), self._ends
                )
            yield


def writer_of(module: str) -> type[CachedWriter] | type[OwnWriter]:
    """Return the writer of a model `package.module:Class`; ValueError if the model has no method for it."""
    found = find_model(module)
    if all(callable(getattr(found, name, None)) for name in ("prefill", "step", "unstack")):
        return CachedWriter
    if callable(getattr(found, "generate", None)):
        return OwnWriter
    raise ValueError(
        f"model.module '{module}' has no method `generate`, which is needed to write text; add one like that of "
        "diloco_jax.training.models.decoder:Decoder"
    )
