"""Rows of chat data as tokens with weights, for token stores."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from diloco_jax.training.chat.rows import read_row, without_nulls
from diloco_jax.training.chat.template import ChatTemplate, open_template
from diloco_jax.training.chat.turns import Completion, Encoded, encode_completion, encode_conversation
from diloco_jax.training.data.documents import SourcePiece, read_values
from diloco_jax.training.data.tokenizer import Tokenizer

# Formats whose rows have all keys of all rows, with null where a row does not have one.
TABLES = ("parquet", "arrow")


class ChatEncoder:
    """Encodes rows with the chat template of a tokenizer, which it opens for the first row with messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _template(self) -> ChatTemplate:
        return open_template(self._tokenizer.folder)

    def encode(self, pieces: Sequence[SourcePiece]) -> Iterator[Encoded | None]:
        """Yield each row of some pieces; None for one without anything to train on.

        Raises:
          ValueError: a row cannot be read, or its template refuses it; the message names the row.
        """
        for piece in pieces:
            yield from read_values(piece, partial(self._encode_row, piece))

    def _encode_row(self, piece: SourcePiece, row: Mapping[str, Any]) -> Encoded | None:
        if piece.format in TABLES:
            row = {key: without_nulls(value) for key, value in row.items()}
        found = read_row(row, piece.field)
        if found is None or piece.loss_on is None:
            return None
        if isinstance(found, Completion):
            return encode_completion(found, self._tokenizer, piece.loss_on)
        encoded = encode_conversation(found, self._template, self._tokenizer, piece.loss_on)
        return encoded if encoded.weights.any() else None
