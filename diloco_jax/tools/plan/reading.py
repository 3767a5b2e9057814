"""The data that a run will read: sources, their sizes, how often they are read, and some samples as text."""

from typing import Any

import numpy as np

from diloco_jax.runtime.model.evaluation import run_source
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.chat.packing import PackedConversations
from diloco_jax.training.data.corpus import Source
from diloco_jax.training.data.mixture import Samples
from diloco_jax.training.data.order import SampleOrder
from diloco_jax.training.data.sample import SEGMENTS, TOKENS, WEIGHTS, Sample, count_predicted, stack

SHOWN, SHOWN_CHARS = 3, 300
# Characters of a sample of conversations, and of a part of it that is not trained on.
CHAT_CHARS, PART_CHARS = 600, 200
# The brackets around what is trained on.
OPENING, CLOSING = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"
# Samples, at equal distances, that the estimate of bytes per token uses.
COUNTED = 256


def reading(config: RunConfig) -> dict[str, Any]:
    """Open the data that a run will read, and count it; separate corpora count as equal shares."""
    source = run_source(config)
    tokens = config.planned_steps * config.budget.step_tokens
    planned = tokens // config.train.seq_len
    parts = source.parts or {config.data.module or config.data.path: source}
    shares = np.asarray(source.weights or (1.0,)) / sum(source.weights or (1.0,))
    sources = {
        name: _counted(part, float(share), planned, config.train.seq_len)
        for (name, part), share in zip(parts.items(), shares, strict=True)
    }
    order = SampleOrder(source, config.data.shuffle_seed + config.seed)
    held_out = {"": source.held_out, **source.evaluation}
    return {
        "samples": planned,
        "tokens": tokens,
        "vocab_size": source.vocab_size,
        "corpus": source.corpus,
        "sources": sources,
        "held_out": {name: _held_out(source, samples) for name, samples in held_out.items()},
        **_too_long(source),
        "first": [_shown(source, source.train[order.window_id(position)]) for position in range(SHOWN)],
    }


def _counted(part: Source, share: float, planned: int, seq_len: int) -> dict[str, Any]:
    facts = part.store.facts if part.store else {}
    return {
        "documents": facts.get("documents"),
        "tokens": facts.get("tokens"),
        "trained": facts.get("trained"),
        "rows_left_out": facts.get("rows_left_out"),
        "samples_per_epoch": len(part.train),
        "tokens_per_epoch": len(part.train) * seq_len,
        "held_out_samples": len(part.held_out),
        "share": share,
        "epochs": planned * share / len(part.train),
    }


def _held_out(source: Source, samples: Samples) -> dict[str, Any]:
    tokenizer, bytes_ = source.tokenizer, None
    if tokenizer is not None:
        batch = stack([samples[number * len(samples) // COUNTED] for number in range(COUNTED)])
        bytes_ = tokenizer.bytes_of(batch) / count_predicted(batch)
    return {"samples": len(samples), "bytes_per_token": bytes_}


def _too_long(source: Source) -> dict[str, int]:
    """Count the conversations that do not fit into a sample."""
    every = [samples for part in source.parts.values() or (source,) for samples in (part.train, part.held_out)]
    found = [samples for samples in every if isinstance(samples, PackedConversations)]
    return {"cut": sum(each.cut for each in found), "left_out": sum(each.left_out for each in found)}


def _shown(source: Source, sample: Sample) -> str:
    """Return a sample as text, with brackets around trained tokens if not all are; its arrays without a tokenizer."""
    if source.tokenizer is None:
        return ", ".join(f"{name} {value.dtype}{list(value.shape)}: {value.flat[:8]}" for name, value in sample.items())
    real = sample.get(SEGMENTS, np.ones_like(sample[TOKENS])) > 0
    ids, trained = sample[TOKENS][real], sample.get(WEIGHTS, np.ones_like(sample[TOKENS]))[real] > 0
    if trained.all():
        return source.tokenizer.decode(ids)[:SHOWN_CHARS]
    edges = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    shown = ""
    for at, part in zip((0, *edges), map(source.tokenizer.decode, np.split(ids, edges)), strict=True):
        # The parts that are not trained on, such as descriptions of tools, may be long.
        half = PART_CHARS // 2
        short = (
            part if trained[at] or len(part) <= PART_CHARS else f"{part[:half]}\N{HORIZONTAL ELLIPSIS}{part[-half:]}"
        )
        shown += f"{OPENING}{short}{CLOSING}" if trained[at] else short
        if len(shown) >= CHAT_CHARS:
            break
    return shown


def describe(result: dict[str, Any]) -> str:
    """Return the counts of `reading` as lines for people."""
    lines = [f"{result['samples']:,} samples of {result['tokens']:,} tokens in all, ids below {result['vocab_size']:,}"]
    for name, each in result["sources"].items():
        documents = f"{each['documents']:,} documents, " if each["documents"] is not None else ""
        if each["trained"] is not None:
            documents += f"{each['trained'] / each['tokens']:.0%} of {each['tokens']:,} tokens trained on, "
        lines += [
            f"{name}: {documents}{each['tokens_per_epoch']:,} tokens in {each['samples_per_epoch']:,} samples "
            f"per epoch, {each['share']:.1%} of the run, {each['epochs']:.2f} times"
        ]
    for name, each in result["held_out"].items():
        bytes_ = f", {each['bytes_per_token']:.2f} bytes per token" if each["bytes_per_token"] else ""
        lines.append(f"held out{f' {name}' if name else ''}: {each['samples']:,} samples{bytes_}")
    lines += [
        f"{name}: {each['rows_left_out']:,} rows are left out, because they have nothing to train on"
        for name, each in result["sources"].items()
        if each["rows_left_out"]
    ]
    lines += [f"{result['cut']:,} conversations are cut to fit a sample, {result['left_out']:,} are left out"] * (
        result["cut"] + result["left_out"] > 0
    )
    return "\n".join([*lines, *(f"sample {number}: {text!r}" for number, text in enumerate(result["first"]))])
