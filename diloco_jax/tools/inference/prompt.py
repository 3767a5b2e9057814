"""Prompts with images: token ids with a place for each soft token, and the images' patches."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diloco_jax.settings.run import RunConfig
from diloco_jax.training.data.images import PATCH, POOL, cut_image
from diloco_jax.training.data.pictures import FILE_BYTES_MAX, Broken, decode
from diloco_jax.training.data.sample import PATCHES, POSITIONS, Sample
from diloco_jax.training.data.tokenizer import Tokenizer
from diloco_jax.training.models.config import SEEING_DECODER
from diloco_jax.training.models.protocol import config_from_args
from diloco_jax.training.models.seeing import SeeingConfig


class Prompt(NamedTuple):
    """A text to continue."""

    ids: list[int]
    # The arrays of its images in a batch of one sample; empty without images.
    arrays: Sample


def prompt_of(config: RunConfig, tokenizer: Tokenizer, text: str, files: Sequence[Path]) -> Prompt:
    """Return a prompt with images, each between the tokens that begin and end an image.

    Args:
      config: the run, whose data.images has the number of soft tokens of an image.
      tokenizer: the tokenizer of the run.
      text: the text. It has the image token (data.images.image_token) where an image is, once for each file and in
        their order; without any, the images come first.
      files: images; at least one.

    Raises:
      ValueError: the model has no tower, a file is not an image, or the text has another number of places.
    """
    if config.model.module != SEEING_DECODER:
        raise ValueError(
            f"--image needs a model with a vision tower, but model.module is '{config.model.module}'; import Gemma 4 "
            "with --images, or leave --image out"
        )
    c = config_from_args(SeeingConfig, config.model.args)
    tower = c.tower_config()
    if (tower.patch_size, tower.pool) != (PATCH, POOL):
        raise ValueError(
            f"model.args.tower has patch_size {tower.patch_size} and pool {tower.pool}, but images are cut into "
            f"patches of {PATCH} pixels, {POOL} x {POOL} for a soft token; --image cannot be used with this tower"
        )
    cut = [cut_image(_read(file), config.data.images.soft_tokens) for file in files]
    name = config.data.images.image_token
    text = text if name in text else name * len(files) + text
    if tokenizer.made is None:
        parts = [tokenizer.encode(part) for part in text.split(name)]
        ids = [*parts[0], *(id for part in parts[1:] for id in (c.image_token, *part))]
    else:
        ids = tokenizer.encode(text)
    if (count := ids.count(c.image_token)) != len(files):
        raise ValueError(
            f"the ids of the prompt have the image token {count} times (id {c.image_token}, in text {name}), but there "
            f"are {len(files)} images; write it once for each, or leave it out, and check data.images.image_token"
        )
    left, found = iter(cut), list[int]()
    for id in ids:
        soft = [c.image_begin, *[id] * next(left).soft_tokens, c.image_end] if id == c.image_token else [id]
        found += soft
    arrays = {PATCHES: np.stack([one.pixels for one in cut]), POSITIONS: np.stack([one.positions for one in cut])}
    return Prompt(found, {key: value[None] for key, value in arrays.items()})


def _read(file: Path) -> np.ndarray:
    try:
        with file.open("rb") as opened:
            # One byte more than the limit is enough for the refusal of a larger file, or of one without an end.
            return decode(opened.read(FILE_BYTES_MAX + 1))
    except OSError as error:
        raise ValueError(f"--image {file} cannot be read: {error.strerror}; correct the path") from error
    except Broken as error:
        raise ValueError(f"--image {file} cannot be used: {error}; convert it, or give another") from error
