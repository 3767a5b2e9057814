"""Settings of the data, separate from the readers, because a process without data does not need these."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from diloco_jax.protocol.corpora import wrong_corpus_name
from diloco_jax.training.named import check_choices, check_setting

DataFormat = Literal["bytes", "tokens", "store", "text", "jsonl", "parquet", "arrow", "arrayrecord", "chat", "images"]
# The tokens of conversations that have a weight in the loss.
LossOn = Literal["completion", "last", "all"]
TokenDtype = Literal["uint16", "uint32"]

STDLIB = "stdlib"
# Formats with one array of ids; other formats are token stores or become one.
PLAIN = ("bytes", "tokens")
SOURCES_MAX = 64
SHARE_MIN = 1e-4
PREFETCH_MAX = 64
SOFT_TOKENS_MAX = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """A source of a mixture or of an evaluation; its settings mean the same as those of `data`."""

    path: str
    """A file, a folder, or a URL such as gs://bucket/folder. Set it for each source; the path may differ between
    machines, but the content must be the same."""
    format: DataFormat = "store"
    """See data.format. Set it to what the path holds; the default is a folder of diloco tokenize."""
    weight: float = 1.0
    """Share of the samples, relative to the other sources. A source with a large weight and few samples is read several
    times. Raise it to read more of this source in a mixture. Sources under data.evaluation do not use it."""
    patterns: tuple[str, ...] = ("*",)
    """See data.patterns. Set it if the folder also has other files."""
    field: str = "text"
    """See data.field. Set it if the column or key with the text has another name."""
    token_dtype: TokenDtype = "uint16"
    """See data.token_dtype. Set it to uint32 if ids reach 65,536."""

    def __post_init__(self) -> None:
        if not 1e-9 <= self.weight <= 1e9:
            raise ValueError(f"the weight of '{self.path}' is {self.weight}; it must be above 0, from 1e-9 to 1e9")
        if not self.patterns:
            raise ValueError(f"the patterns of '{self.path}' are empty; leave them out to read all files")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesConfig:
    """Settings of samples made from images with texts, for format images."""

    soft_tokens: int = 280
    """The most soft tokens of one image, which keeps its aspect ratio; Gemma 4 supports 70, 140, 280, 560 and 1120.
    Raise it if the texts depend on fine details; samples then become longer."""
    column: str = "image"
    """Column of Parquet with the image: its bytes, or a struct with the field `bytes`. Set it if the column has another
    name in your table; a folder of image files does not use this setting."""
    broken: Literal["refuse", "skip"] = "refuse"
    """What happens to images that cannot be decoded. refuse: the run does not start. skip: they are left out. Set it to
    skip if a large collection has some damaged files that you do not need; the run then lacks the samples of these
    images."""
    begin_token: str = "<|image>"
    """Special token of tokenizer.json before the soft tokens of an image; the tokenizer bytes uses id 256 instead. Set
    it if your tokenizer has another name for it. Its id must be the one in model.args."""
    image_token: str = "<|image|>"
    """Special token in the place of each soft token of an image, and once in a text to place the image there; the
    tokenizer bytes uses id 257. Set it if your tokenizer has another name for it. Its id must be the one in
    model.args."""
    end_token: str = "<image|>"
    """Special token after the soft tokens of an image; the tokenizer bytes uses id 258. Set it if your tokenizer has
    another name for it. Its id must be the one in model.args."""

    def __post_init__(self) -> None:
        check_choices("data.images", self)
        if not 1 <= self.soft_tokens <= SOFT_TOKENS_MAX:
            raise ValueError(f"data.images.soft_tokens is {self.soft_tokens}; it must be from 1 to {SOFT_TOKENS_MAX}")
        names = (self.begin_token, self.image_token, self.end_token)
        if not all(names) or len({*names}) < len(names):
            raise ValueError(f"the tokens of data.images are {', '.join(map(repr, names))}; give three different ones")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDataConfig:
    """The corpus of a single island, or of a few that share it. A setting that is left out has the value of `data`."""

    corpus: str = ""
    """See data.corpus. Empty: the name of the island. Set it to the same name for islands that share a corpus."""
    path: str | None = None
    """See data.path. Set it to the data of this island; only its machine needs to have it."""
    format: DataFormat | None = None
    """See data.format. Set it if this island's data has another format than data.format."""
    field: str | None = None
    """See data.field. Set it if the column or key with the text has another name on this island."""
    patterns: tuple[str, ...] | None = None
    """See data.patterns. Set it if this island's folder also has files that must not be trained on."""
    token_dtype: TokenDtype | None = None
    """See data.token_dtype. Set it if this island's token file has another type."""
    held_out_fraction: float | None = None
    """See data.held_out_fraction. Set it if this island's corpus is much smaller or larger than the others."""
    module: str | None = None
    """See data.module. Set it if this island's samples come from your own class."""
    args: dict[str, Any] | None = None
    """See data.args. Set it if this island's class takes other arguments."""

    def over(self, common: "DataConfig", island: str) -> "DataConfig":
        """Return the data of an island: these settings, and for all others those of the run."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        given = {name: value for name, value in own.items() if value is not None}
        given["corpus"] = self.corpus or common.corpus or island
        # One source takes the place of the run's sources, and a path that of the run's own class.
        if self.path is not None or self.module is not None:
            given = {"mixture": {}, "path": STDLIB, "module": "", "args": {}} | given
        return dataclasses.replace(common, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Settings of the corpus, and of how it is cut into samples."""

    format: DataFormat = "bytes"
    """bytes (any text, token = byte), tokens (one binary file of token ids, memory-mapped) or store (a folder that
    diloco tokenize wrote). text, jsonl, parquet, arrow, arrayrecord, chat (conversations in JSONL, Parquet or Arrow, or
    a store of them) and images (a folder of images with texts, or Parquet with both) become a store in $DILOCO_CACHE at
    the first read. Set it together with path. For several machines or large texts, run diloco tokenize once and use
    store, because otherwise each machine tokenizes at its first start."""
    path: str = STDLIB
    """A file or a folder; or 'stdlib', the source of Python's own standard library without its tests (13 MB). A store
    or text may also be at gs://, s3:// or another URL that fsspec reads. Set it for your own data."""
    field: str = "text"
    """Column or key with the text, for jsonl, parquet, arrow and images. In conversations `text` stands for `messages`.
    Set it if your column or key has another name."""
    loss_on: LossOn | None = None
    """The tokens of conversations that are trained on. completion: the assistant's turns, or the completion of a
    prompt; the default. last: only the last turn. all: every token. Set it to last if earlier turns of your data are
    not good, and to all to train on the users' turns too. It must be left out for a store, which keeps the one that it
    was made with."""
    tokenizer: str = ""
    """A folder with tokenizer.json, train:SIZE or bytes, for text and images that become a store; for format tokens,
    the tokenizer that produced the ids. A store contains its tokenizer. Set it for texts that become a store, and for
    format tokens if you want bits per byte and readable samples."""
    images: ImagesConfig = dataclasses.field(default_factory=ImagesConfig)
    """Settings of samples made from images with texts, for format images."""
    documents: Literal["joined", "separate", "whole"] = "joined"
    """joined: samples may span documents. separate: the same samples, but attention and loss stay within a document.
    whole: like separate, but only a document longer than a sample is cut; samples end with padding. No effect on
    images and conversations, which are always whole. Set it to separate or whole if unrelated documents must not see
    each other."""
    mixture: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    """Several sources by name, read in proportion to their weights; they replace path and format. Set it to train on
    more than one source."""
    evaluation: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    """Further sources by name that are only used for evaluation. Set it to see the loss on texts that are not trained
    on, such as another language; each source adds its batches to every evaluation."""
    patterns: tuple[str, ...] = ("*",)
    """Which files of a folder to read, by file name; for stdlib always '*.py'. Set it if the folder also has files that
    must not be trained on. All machines must read the same files, because islands with other data are refused."""
    token_dtype: TokenDtype = "uint16"
    """Type of the ids in a token file, little-endian. Set it to uint32 if your tokenizer has more than 65,536 ids. With
    the wrong type all ids are wrong, and a run notices this only if an id is data.vocab_size or more."""
    vocab_size: int = 65_536
    """Upper bound of the ids in a token file or in your own source (checked on every batch); bytes always have 256. Set
    it to the number of ids of your tokenizer, so that a wrong file is noticed; model.args.vocab_size must be at least
    as large."""
    held_out_fraction: float = 0.02
    """Share of the corpus, at its end, kept for evaluation; more than 0, less than 1. Raise it if the corpus is small
    and the evaluation loss is noisy."""
    shuffle_seed: int = 0
    """Seed of the global order of the samples; islands of one run must agree. Change it to train on another order of
    the data from the same initial parameters."""
    prefetch: int = 4
    """Batches that each process of an island reads ahead on a separate thread, 1 GB at most. 0: the thread of the steps
    reads each batch while the previous step runs, for a source that must not be read on another thread. Raise it if the
    metric waiting_for_data shows that steps wait for the source; each batch takes CPU memory."""
    module: str = ""
    """Your own source as package.module:Name, instead of path and format: a class with `__len__` and `__getitem__`,
    whose samples are arrays of train.seq_len + 1 ids below vocab_size. Set it if your samples come from a database, a
    simulation or a format that data.format does not list. The file with the class must be on every machine."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of that class; all machines of a run must agree. Set it if your class takes arguments."""
    corpus: str = ""
    """Name of a corpus that stays at its site: islands with one name share its samples, and the syncer knows only the
    name, a length and digests. Empty: the corpus of the run, which all other islands share. Set it on the command line
    of `diloco learner`, together with path, if only that machine has the data; islands.each.NAME.data sets it for an
    island in the config."""

    def __post_init__(self) -> None:
        check_setting("data", self.module, self.args)
        if self.corpus and (wrong := wrong_corpus_name(self.corpus)):
            raise ValueError(f"data.corpus: {wrong}")
        if self.module and self.path != STDLIB:
            raise ValueError(f"data.path is '{self.path}', but data.module '{self.module}' takes its place; remove one")
        check_choices("data", self)
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(f"data.held_out_fraction is {self.held_out_fraction}; it must be between 0 and 1")
        if self.vocab_size < 1:
            raise ValueError(f"data.vocab_size is {self.vocab_size}; it must be at least 1")
        if not 0 <= self.prefetch <= PREFETCH_MAX:
            raise ValueError(f"data.prefetch is {self.prefetch}; it must be from 0 to {PREFETCH_MAX} batches")
        if not 0 <= self.shuffle_seed < 2**31:
            raise ValueError(f"data.shuffle_seed is {self.shuffle_seed}; it must be in [0, 2^31)")
        self._check_parts()

    def _check_parts(self) -> None:
        """Check the sources, alone and together."""
        if self.mixture and (self.module or self.path != STDLIB):
            raise ValueError("data.mixture replaces data.path and data.module; remove the one that is not meant")
        if self.module and self.documents != "joined":
            raise ValueError(
                f"data.documents is {self.documents}, but data.module decides itself what a sample is; remove it"
            )
        if (count := len(self.mixture) + len(self.evaluation)) > SOURCES_MAX:
            raise ValueError(f"data.mixture and data.evaluation have {count} sources; {SOURCES_MAX} is the limit")
        for name in (*self.mixture, *self.evaluation):
            if not re.fullmatch(r"[\w.-]{1,64}", name) or (name in self.mixture and name in self.evaluation):
                raise ValueError(
                    f"'{name}' names a source of data; use letters, digits, '.', '_' and '-', and each name once"
                )
        weights = {name: part.weight for name, part in self.mixture.items()}
        for name, weight in weights.items():
            if weight / sum(weights.values()) < SHARE_MIN:
                raise ValueError(
                    f"data.mixture.{name} has {weight} of all weights, less than {SHARE_MIN:.2%}; raise it"
                )
        for part in (*self.sources.values(), *self.evaluation.values()):
            if part.format in PLAIN and self.documents != "joined":
                raise ValueError(
                    f"data.documents is {self.documents}, but format {part.format} of '{part.path}' has no ends of "
                    "documents; make a store from its text (diloco tokenize), or use joined"
                )
            if part.format in (*PLAIN, "store"):
                continue
            # The path may be a store, which has its tokenizer.
            if part.format == "chat" and not self.tokenizer:
                continue
            if part.format == "chat" and (self.tokenizer.startswith("train:") or self.tokenizer == "bytes"):
                raise ValueError(
                    f"'{part.path}' has conversations, but data.tokenizer is '{self.tokenizer}', which has no chat "
                    "template; name the folder of a tokenizer with one"
                )
            if not self.tokenizer or (self.tokenizer.startswith("train:") and (self.mixture or self.evaluation)):
                raise ValueError(
                    f"'{part.path}' of format {part.format} needs data.tokenizer, which is '{self.tokenizer}': a "
                    "folder with tokenizer.json, bytes, or for a single source train:SIZE; diloco tokenize makes one "
                    "from text"
                )

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """Return the training sources by name; a single source has the name ''."""
        if self.mixture:
            return dict(sorted(self.mixture.items()))
        one = SourceConfig(
            path=self.path, format=self.format, patterns=self.patterns, field=self.field, token_dtype=self.token_dtype
        )
        return {} if self.module else {"": one}

    @property
    def with_images(self) -> bool:
        """Return whether a source has images, so that samples of all sources have arrays for them."""
        return any(part.format == "images" for part in (*self.sources.values(), *self.evaluation.values()))

    @property
    def with_chat(self) -> bool:
        """Return whether a source has conversations, so that samples of all sources have weights."""
        return any(part.format == "chat" for part in (*self.sources.values(), *self.evaluation.values()))

    @property
    def soft_tokens(self) -> int:
        """Return the soft tokens that the image of each sample is padded to; 0 without images."""
        return self.images.soft_tokens if self.with_images else 0

    @property
    def remote(self) -> bool:
        """Return whether a source must be downloaded as a whole before it can be read."""
        return any("://" in part.path for part in (*self.sources.values(), *self.evaluation.values()))

    @property
    def plain(self) -> bool:
        """Return whether there is one source of bytes or raw tokens, so that the sizes of files are enough to check."""
        return not (self.module or self.mixture or self.evaluation) and self.format in PLAIN

    @property
    def ids(self) -> int:
        """Return the upper bound of all ids; 0 if only a store, maybe on another machine, knows it."""
        if self.module or any(part.format == "tokens" for part in self.sources.values()):
            return self.vocab_size
        return 256 if all(part.format == "bytes" for part in self.sources.values()) else 0
