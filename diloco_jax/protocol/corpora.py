"""The corpora of a run: what the syncer knows of each, and which learners may join with theirs.

Islands may share the corpus that the run's config names, or each train on a corpus that stays at its site. Of such a
corpus the syncer knows a name, a length and digests, and nothing else. The first learner that names a corpus determines
its content: the positions of its sample order mean something only while the content stays the same.
"""

import re
from typing import Any, NamedTuple

from diloco_jax.protocol.leases import COMMON
from diloco_jax.protocol.messages import Hello

# Names that learners may use for corpora; each has a book of leases.
CORPORA_MAX = 1024
# Metrics, pages and tables show the name.
CORPUS_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
# The name of the run's corpus among scores and metrics.
RUN = "run"
# Entries of a fingerprint that describe the corpus of the run.
OF_DATA = ("data", "corpus")
# A learner with a separate corpus has this, and the name, there instead. A syncer of an older release, which knows one
# corpus only, then refuses it.
SEPARATE = "separate corpus "


def wrong_corpus_name(name: str) -> str:
    """Return what is wrong with the name of a separate corpus; "" if nothing is."""
    if not re.fullmatch(CORPUS_NAME, name):
        return f"the corpus {name[:80]!r} is not allowed; use up to 64 letters, digits, '.', '_', '-'"
    return f"the corpus name {RUN!r} stands for the corpus of the run; use another one" if name == RUN else ""


def corpus_of(hello: Hello) -> str:
    """Return the name of the corpus whose samples a learner leases; one that leases nothing counts as a reader of the
    run's."""
    return hello.corpus if hello.step_samples else COMMON


class Corpus(NamedTuple):
    """All that the syncer knows of a corpus."""

    # Length and digest; "" for the corpus of the run, which the fingerprint describes.
    content: str
    # Training samples in one epoch, 0 if unknown.
    samples: int


class OwnCorpus(NamedTuple):
    """The description of the corpus that a learner reads; the fields are those of its greeting."""

    corpus: str = COMMON
    content: str = ""
    corpus_samples: int = 0
    tokenizer: str = ""


THE_RUNS = OwnCorpus()


class Corpora:
    """The corpora by name, and the tokenizer that all of them share."""

    def __init__(self) -> None:
        self.known: dict[str, Corpus] = {}
        # Digest of the first known tokenizer; "" while none is known.
        self.tokenizer = ""

    def refusal(self, hello: Hello) -> str:
        """Return why a learner cannot join with its corpus, or an empty string."""
        who = hello.learner_id
        if self.tokenizer and hello.tokenizer and hello.tokenizer != self.tokenizer:
            return (
                f"the tokenizer differs: its digest is {self.tokenizer} in this run and {hello.tokenizer} on {who}; "
                "make the token ids of every corpus with one tokenizer (`diloco tokenize --tokenizer`)"
            )
        if corpus_of(hello) == COMMON:
            return ""
        if wrong := wrong_corpus_name(hello.corpus):
            return wrong
        known = self.known.get(hello.corpus)
        if known is not None and known.content != hello.content:
            # The refusal does not tell what the run knows, because anyone may greet with the name of a corpus.
            return (
                f"the corpus {hello.corpus!r} differs from the one that this run has under the name: {who} has "
                f"{hello.content}; restore its files, or give the changed corpus another name (data.corpus), whose "
                "samples count from 0"
            )
        if known is None and len(self.known) >= CORPORA_MAX:
            return f"{len(self.known)} corpora are known, the limit is {CORPORA_MAX}; use one of their names"
        return ""

    def join(self, hello: Hello) -> None:
        """Record the corpus of a learner that was not refused."""
        self.tokenizer = self.tokenizer or hello.tokenizer
        # Learners with separate loaders lease nothing.
        if hello.step_samples and (hello.corpus not in self.known or not self.known[hello.corpus].samples):
            self.known[hello.corpus] = Corpus(hello.content, hello.corpus_samples)

    def state(self) -> dict[str, Any]:
        return {"known": {name: list(corpus) for name, corpus in self.known.items()}, "tokenizer": self.tokenizer}

    def restore(self, state: dict[str, Any]) -> None:
        self.known = {name: Corpus(*plain) for name, plain in state.get("known", {}).items()}
        self.tokenizer = state.get("tokenizer", "")
