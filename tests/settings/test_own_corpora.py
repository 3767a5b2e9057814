"""Settings of corpora that stay at their sites: what an island reads, and what it tells of it."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_jax.protocol.corpora import OwnCorpus
from diloco_jax.settings.fingerprint import fingerprint, own_corpus
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump, parse, parse_text

DATA = {"format": "text", "path": "common", "tokenizer": "words", "held_out_fraction": 0.1}


def config(each: dict[str, Any], **data: Any) -> RunConfig:
    settings: dict[str, Any] = {"islands": {"count": 3, "each": {n: {"data": d} for n, d in each.items()}}}
    return parse(settings | {"data": DATA | data, "train": {"batch_size": 6}}, "the test")


SITES = config({"island-0": {"path": "fr"}, "island-1": {"corpus": "german", "path": "de", "format": "jsonl"}})


def test_an_island_reads_its_own_data_with_the_other_settings_of_the_run() -> None:
    first, second, third = (SITES.of_island(name).data for name in SITES.islands.names)
    assert (first.corpus, first.path, first.format, first.tokenizer) == ("island-0", "fr", "text", "words")
    assert (second.corpus, second.path, second.format, second.held_out_fraction) == ("german", "de", "jsonl", 0.1)
    assert third == SITES.data and SITES.of_island("elsewhere").data == SITES.data
    # It is applied once more where a config has passed through another process.
    assert SITES.of_island("island-1").of_island("island-1") == SITES.of_island("island-1")
    assert list(SITES.corpora) == ["", "german", "island-0"] and SITES.shares_corpus
    assert parse_text(dump(SITES), "the test") == SITES


def test_one_source_replaces_a_mixture_and_a_class() -> None:
    mixed = config({"island-0": {"path": "fr"}}, path="stdlib", mixture={"a": {"path": "x"}, "b": {"path": "y"}})
    assert mixed.of_island("island-0").data.mixture == {} and mixed.of_island("island-1").data.mixture
    own = config({"island-0": {"module": "mine:Source"}}, vocab_size=256)
    data = own.of_island("island-0").data
    assert data.module == "mine:Source" and data.path == "stdlib"


def test_nobody_reads_the_run_s_corpus_if_all_have_their_own() -> None:
    everybody = config({f"island-{n}": {"path": str(n)} for n in range(3)})
    assert not everybody.shares_corpus and sorted(everybody.corpora) == ["island-0", "island-1", "island-2"]
    # On the command line of a learner.
    alone = replace(SITES, data=replace(SITES.data, corpus="mine"))
    assert not alone.shares_corpus and alone.of_island("island-2").data.corpus == "mine"


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"corpus": "two words"}, "islands.each.island-0: data.corpus: the corpus 'two words' is not allowed"),
        ({"corpus": "run"}, "stands for the corpus of the run"),
        ({"corpus": "x" * 65}, "use up to 64 letters"),
        ({"paht": "fr"}, "did you mean islands.each.island-0.data.path"),
        ({"held_out_fraction": 2.0}, "data.held_out_fraction is 2.0"),
    ],
)
def test_wrong_data_of_an_island_is_refused(own: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config({"island-0": own})


def test_the_data_of_one_island_is_not_checked_with_that_of_another() -> None:
    each = {"island-0": {"path": "fr"}, "island-1": {"args": {"size": 2}}}
    both = config(each, module="mine:Source", path="stdlib", vocab_size=256)
    assert both.of_island("island-0").data.path == "fr" and both.of_island("island-1").data.args == {"size": 2}


def test_data_parallel_has_no_islands() -> None:
    everybody = {f"island-{n}": {"data": {"path": str(n)}} for n in range(3)}
    with pytest.raises(ValueError, match="data_parallel has no islands"):
        parse(
            {"algorithm": "data_parallel", "islands": {"count": 3, "each": everybody}, "train": {"batch_size": 6}},
            "the test",
        )


def test_an_island_tells_name_length_and_digest_of_its_corpus_and_no_path() -> None:
    """A change of how the corpus is cut is a change of its content, because positions mean other samples then."""
    own = SITES.of_island("island-1")
    told = own_corpus(own, "7 tokens with digest ab", 40, "t")
    assert told[0] == "german" and told[2:] == (40, "t") and told.content.startswith("7 tokens with digest ab, cut as ")
    for change in ({"shuffle_seed": 1}, {"held_out_fraction": 0.2}):
        other = replace(own, data=replace(own.data, **change))
        assert own_corpus(other, "7 tokens with digest ab", 40, "t").content != told.content
    assert (
        own_corpus(replace(own, data=replace(own.data, path="elsewhere")), "7 tokens with digest ab", 40, "t") == told
    )
    assert own_corpus(SITES, "9 tokens", 40, "t") == OwnCorpus("", "", 40, "t")
    pairs = dict(fingerprint(own, "plan", "7 tokens"))
    assert pairs["data"] == pairs["corpus"] == "separate corpus german"
    assert not any(value == "de" or '"de"' in value for value in pairs.values())
    shared = dict(fingerprint(SITES, "plan", "9 tokens"))
    assert shared["corpus"] == "9 tokens"
    assert {what for what in pairs if pairs[what] != shared[what]} == {"data", "corpus"}
