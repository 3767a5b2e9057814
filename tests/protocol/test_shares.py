"""Every receiver of a version is told the newest round that merged a value of its own: what rounding kept back of a
value that was left out must not come back."""

from __future__ import annotations

from diloco_jax.protocol.messages import NO_VERSION, Adopted, GlobalFragment, PullRequest
from diloco_jax.protocol.syncer.machine import Syncer
from tests.protocol.pair import Pair
from tests.protocol.syncer_inputs import fragment, hello, merged, report, running, sent, value

ONE = {"sync_every": 1, "num_fragments": 1}


def told(messages: list[object]) -> list[tuple[int, int]]:
    """Version and merged round of the global fragments among these messages."""
    return [(m.version, m.merged_round) for m in messages if isinstance(m, GlobalFragment)]


def first_round(left_out: tuple[str, ...] = ()) -> tuple[Syncer, dict[str, list[object]]]:
    """Two learners and a model of one fragment, after the first round; what each of them heard."""
    syncer = running_one()
    for name in ("a", "b"):
        syncer.on_message(value(name, 1, 0, 1), 2.0)
    effects = merged(syncer, 1, 3.0, left_out)
    return syncer, {name: list(sent(effects, name)) for name in ("a", "b")}


def running_one() -> Syncer:
    """As `running`, with one fragment."""
    syncer = running(quorum=2, **ONE)
    for name in ("a", "b"):
        syncer.on_message(hello(name, versions=(0,)), 0.0)
    for name in ("a", "b"):
        syncer.on_message(report(name, 1, (Adopted(0),)), 1.0)
    return syncer


def test_whoever_was_left_out_is_told_so_and_is_not_asked_again_before_it_holds_the_new_version() -> None:
    syncer, heard = first_round(left_out=("b",))
    assert told(heard["a"]) == [(1, 1)] and told(heard["b"]) == [(1, NO_VERSION)]
    syncer.on_message(report("a", 2, (Adopted(1, 1, 10),)), 4.0)
    for step in (2, 3):  # what is bad is still in its parameters: it would be a second strike for one value
        effects = syncer.on_message(report("b", step, (Adopted(0),)), 4.0 + step)
        assert not [m for m in sent(effects, "b") if isinstance(m, PullRequest)]
    effects = syncer.on_message(report("b", 4, (Adopted(1, 3, 30),)), 9.0)
    assert PullRequest(2, 0, 4) in sent(effects, "b")
    assert syncer.membership.members["b"].credit.strikes == 1


def test_without_a_new_version_nothing_will_replace_its_parameters_so_it_is_asked_again() -> None:
    syncer, heard = first_round(left_out=("a", "b"))
    assert told(heard["a"]) == told(heard["b"]) == []
    syncer.on_message(report("a", 2, (Adopted(0),)), 4.0)
    assert PullRequest(2, 0, 2) in sent(syncer.on_message(report("b", 2, (Adopted(0),)), 4.0), "b")


def test_whoever_missed_a_version_learns_later_that_it_has_a_share_in_it() -> None:
    syncer, _ = first_round()
    syncer.on_disconnect("b", 1, "lost", 4.0)  # with the version on its way
    back = syncer.on_message(hello("b", versions=(0,)), 5.0)
    assert told(list(sent(back, "b"))) == [(1, 1)]
    newer = syncer.on_message(hello("b", 2, versions=(NO_VERSION,)), 6.0)
    assert told(list(sent(newer, "b"))) == [(1, NO_VERSION)], "its next life gave nothing"


def test_what_a_learner_gave_is_told_after_a_restart() -> None:
    syncer, _ = first_round(left_out=("b",))
    other = running_one()
    other.restore(syncer.state())
    other.on_restart([1], [syncer.digests[0]], 10.0)
    for name, share in (("a", 1), ("b", NO_VERSION)):
        effects = other.on_message(hello(name, versions=(0,)), 11.0)
        assert told(list(sent(effects, name))) == [(1, share)]


def test_of_a_version_that_was_lost_with_the_syncer_nobody_has_a_share() -> None:
    syncer, _ = first_round()
    syncer.on_restart([0], [0], 10.0)
    for name in ("a", "b"):  # neither has taken version 1: it is gone
        syncer.on_message(hello(name, versions=(0,)), 11.0)
    assert syncer.versions == [0]
    effects = syncer.on_message(hello("a", versions=(NO_VERSION,)), 12.0)
    assert told(list(sent(effects, "a"))) == [(0, NO_VERSION)]


def test_when_the_end_of_the_tape_is_lost_nobody_is_promised_a_share_that_it_may_not_have() -> None:
    """A value left out is then forgotten: an old residual twice does less harm than one of a bad value once."""
    pair = Pair(quorum=2, snapshot_every=1)
    pair.join("a", "b")
    pair.poisoned = {"b"}
    pair.holds_merges = True
    pair.step("a", "b")
    pair.held = {"b"}
    pair.merge()
    assert pair.syncer.versions[1] == 1
    pair.lose_wire("b")
    lost = len(pair.tape) - max(n for n, line in enumerate(pair.tape) if line.startswith('["merged"'))
    pair.held = set()
    pair.restart_syncer(lost_lines=lost)
    pair.connect("a", "b")
    pair.wait(60.0)
    assert pair.syncer.versions[1] == 1, "a brought it"
    assert told([m for _, receiver, m in pair.sent if receiver == "b"])[-1] == (1, NO_VERSION)


def test_a_whole_value_and_a_step_both_tell() -> None:
    pair = Pair(quorum=2, steps=True)
    pair.join("a", "b")
    for _ in range(3):
        pair.wait(1.0)
        pair.step("a", "b")
    steps = [m for _, _, m in pair.sent if isinstance(m, GlobalFragment) and m.base >= 0]
    assert steps and all(m.merged_round == m.version for m in steps)
    assert fragment(1, 0, 1).merged_round == NO_VERSION, "the initial model holds nobody's"
