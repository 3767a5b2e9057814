"""Token ids of a text with an image in it, as Gemma 4's processor writes them.

An image becomes a token that begins it, one image token for each of its soft tokens, and a token that ends it. A stored
text has a single image token, which `spread` repeats.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from diloco_jax.training.data.config import ImagesConfig
from diloco_jax.training.data.tokenizer import BYTES, TOKENIZER_FILE, Tokenizer, open_tokenizer

# Ids of the special tokens beside bytes: the begin of an image, the image, and its end.
BYTE_IDS = (256, 257, 258)


class ImageTokenizer(NamedTuple):
    """A tokenizer with the special tokens of images."""

    tokenizer: Tokenizer
    config: ImagesConfig
    # Ids of the tokens that begin an image, stand for a soft token, and end the image.
    begin: int
    image: int
    end: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of a document with one image, which is where the text has the image token, or else in front.

        Raises:
          ValueError: the text has the image token more than once.
        """
        name = self.config.image_token
        if (count := text.count(name)) > 1:
            raise ValueError(f"it has {name} {count} times, and a sample has one image; remove the others")
        before, _, after = text.partition(name) if count else ("", "", text)
        if self.tokenizer.made is None:
            ids = [*before.encode(), self.begin, self.image, self.end, *self.tokenizer.encode_document(after)]
        else:
            # The whole text is encoded at once, because some tokenizers put a space before the first word only.
            ids = self.tokenizer.encode_document(
                f"{before}{self.config.begin_token}{name}{self.config.end_token}{after}"
            )
        if ids.count(self.image) != 1:
            raise ValueError(f"its ids have {name} {ids.count(self.image)} times instead of once; write it differently")
        return ids


def open_image_tokenizer(name: str, config: ImagesConfig) -> ImageTokenizer:
    """Open the tokenizer in a folder, or the tokenizer `bytes`, whose special tokens of images have ids 256 to 258.

    Raises:
      ValueError: the tokenizer is missing, or lacks one of the special tokens.
    """
    tokenizer = open_tokenizer(name)
    if tokenizer.made is None:
        return ImageTokenizer(replace(tokenizer, vocab_size=BYTE_IDS[-1] + 1), config, *BYTE_IDS)
    names = (config.begin_token, config.image_token, config.end_token)
    ids = [tokenizer.made.token_to_id(each) for each in names]
    found = tokenizer.made.encode("".join(names), add_special_tokens=False).ids
    if found != ids:
        missing = [each for each, number in zip(names, ids, strict=True) if number is None]
        raise ValueError(
            f"{TOKENIZER_FILE} of '{name}' has no special token {' and no '.join(missing or names)} for images; name "
            f"such tokens of it in data.images (begin_token, image_token, end_token), or for a trial use train:SIZE or "
            f"{BYTES}"
        )
    return ImageTokenizer(tokenizer, config, *ids)


def spread(
    ids: Int32[np.ndarray, " n"], place: int, soft_tokens: int, size: int
) -> tuple[Int32[np.ndarray, " t"], Int32[np.ndarray, " t"]]:
    """Repeat the image token at a place, and cut or pad the text at its end.

    Returns:
      The tokens, 0 in padding, and their segments: 1, and 0 in padding.
    """
    whole = np.concatenate((ids[:place], np.repeat(ids[place], soft_tokens), ids[place + 1 :]))[:size]
    tokens, segments = np.zeros((2, size), np.int32)
    tokens[: len(whole)], segments[: len(whole)] = whole, 1
    return tokens, segments
