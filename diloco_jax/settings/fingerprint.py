"""The fingerprint of a run: the settings that its learners and its syncer must share."""

import json
from dataclasses import MISSING, asdict, fields
from hashlib import blake2s
from typing import Any

from diloco_jax.protocol.corpora import SEPARATE, OwnCorpus
from diloco_jax.protocol.membership import BASE_WEIGHTS
from diloco_jax.protocol.syncer.progress import GLOBAL_STEPS
from diloco_jax.protocol.syncer.subscribers import MODEL_LAYOUT
from diloco_jax.settings.run import RunConfig

# Characters of the description of a corpus that are sent as they are.
CONTENT_SHOWN = 60


def fingerprint(config: RunConfig, plan_fingerprint: str, corpus: str, base: str = "") -> tuple[tuple[str, str], ...]:
    """List what a learner and the syncer must agree on, as (name, value) pairs that an error can show.

    Args:
        plan_fingerprint: fingerprint of the fragment plan, computed from the shapes of this process's model.
        corpus: name of what this process reads (training/data/corpus.py); "" if it reads nothing. The first learner
            then determines the corpus.
        base: digest of the weights below this process's adapters; "" if it has not read them.
    """
    data, separate = _of_samples(config), f"{SEPARATE}{config.data.corpus}"
    pairs = {
        "run": config.name,
        "seed": str(config.seed),
        "model": f"{config.model.module} {json.dumps(dict(config.model.args), sort_keys=True)}",
        MODEL_LAYOUT: plan_fingerprint,
        "sequence length": str(config.train.seq_len),
        GLOBAL_STEPS: config.limits.text,
        "protocol": config.protocol.words,
        "wire": f"{config.wire.up} up, {config.wire.down} down, states {config.wire.states}",
        "adoption": f"{config.adopt.mode} {config.adopt.alpha}",
        "inner optimizer": json.dumps(_differing(config.optimizer), sort_keys=True),
        # A corpus that stays at its site is compared with those of the same name only (`own_corpus`).
        "data": separate if config.data.corpus else data,
        "corpus": separate if config.data.corpus else corpus,
    }
    if config.model.lora.rank:
        pairs |= {"adapters": json.dumps(asdict(config.model.lora), sort_keys=True), BASE_WEIGHTS: base}
    return tuple(sorted(pairs.items()))


def own_corpus(config: RunConfig, content: str, samples: int, tokenizer: str) -> OwnCorpus:
    """Describe the corpus that a learner reads for the syncer.

    Args:
        content: length and digest of what it reads; "" if unknown.
        samples: training samples in one epoch; 0 if unknown.
        tokenizer: digest of the tokenizer of its token ids; "" if unknown.
    """
    if not config.data.corpus:
        return OwnCorpus("", "", samples, tokenizer)
    # Positions mean the same samples only where the corpus is read, cut and shuffled in the same way.
    whole = f"{content} {_of_samples(config)} {config.train.seq_len}"
    content = f"{content[:CONTENT_SHOWN]}, cut as {blake2s(whole.encode(), digest_size=4).hexdigest()}"
    return OwnCorpus(config.data.corpus, content, samples, tokenizer)


def _of_samples(config: RunConfig) -> str:
    """Return the settings that decide what a position of the sample order means, beside the content of the files."""
    data = _differing(config.data)
    for part in (data, *data.get("mixture", {}).values()):
        # The same corpus may be stored elsewhere on another machine. Its content is compared instead.
        part.pop("path", None)
    for own in ("evaluation", "tokenizer", "prefetch", "corpus"):
        data.pop(own, None)
    return json.dumps(data, sort_keys=True)


def _differing(section: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults, so that a release with more settings agrees with this
    one."""
    usual = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(section)
    }
    return {name: value for name, value in asdict(section).items() if getattr(section, name) != usual[name]}
