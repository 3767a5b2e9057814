"""Settings of the data, apart from what reads it: a process without data of its own needs no reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from diloco_jax.training.named import check_setting

DataFormat = Literal["bytes", "tokens"]
TokenDtype = Literal["uint16", "uint32"]

STDLIB = "stdlib"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Settings of the corpus, and of its cut into windows."""

    format: DataFormat = "bytes"
    """bytes (any text, token = byte) or tokens (one binary file of token ids, memory-mapped)."""

    path: str = STDLIB
    """A file or a folder; or 'stdlib', the source of Python's own standard library without its tests (13 MB)."""

    patterns: tuple[str, ...] = ("*",)
    """Which files of a folder to read, by file name; for stdlib always '*.py'."""

    token_dtype: TokenDtype = "uint16"
    """Type of the ids in a token file, little-endian."""

    vocab_size: int = 65_536
    """Ids in a token file or a source of your own are below this (checked on every batch); bytes always have 256."""

    held_out_fraction: float = 0.02
    """Share of the corpus, at its end, kept for evaluation; more than 0, less than 1."""

    shuffle_seed: int = 0
    """Seed of the global order of the windows; islands of one run must agree."""

    module: str = ""
    """A source of your own as package.module:Name, in place of path and format: a class with `__len__` and
    `__getitem__`, whose samples are arrays of train.seq_len + 1 ids below vocab_size."""

    args: dict[str, Any] = field(default_factory=dict)
    """Passed to that class by name; all machines of a run must agree."""

    def __post_init__(self) -> None:
        check_setting("data", self.module, self.args)
        if self.module and self.path != STDLIB:
            raise ValueError(f"data.path is '{self.path}', but data.module '{self.module}' takes its place; remove one")
        if self.format not in get_args(DataFormat):
            raise ValueError(f"data.format is '{self.format}'; choose from {', '.join(get_args(DataFormat))}")
        if self.token_dtype not in get_args(TokenDtype):
            raise ValueError(f"data.token_dtype is '{self.token_dtype}'; choose from {', '.join(get_args(TokenDtype))}")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(f"data.held_out_fraction is {self.held_out_fraction}; it must be between 0 and 1")
        if self.vocab_size < 1 or not self.patterns:
            raise ValueError(f"data.vocab_size is {self.vocab_size}, data.patterns {self.patterns}; both must be given")
        if not 0 <= self.shuffle_seed < 2**31:
            raise ValueError(f"data.shuffle_seed is {self.shuffle_seed}; it must be in [0, 2^31)")

    @property
    def of_bytes(self) -> bool:
        """Tell whether a token is a byte."""
        return self.format == "bytes" and not self.module

    @property
    def ids(self) -> int:
        """Return the number below which all ids are."""
        return 256 if self.of_bytes else self.vocab_size
