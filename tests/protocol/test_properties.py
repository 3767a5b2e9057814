"""Any interleaving of inputs, from any peer, in any state: nothing raises, what is bounded stays bounded."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.protocol.learner import JOINING, STOPPED, TRAINING, Learner
from diloco_jax.protocol.messages import (
    Adopt,
    Adopted,
    Advance,
    Effect,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    Hello,
    Leave,
    Merge,
    Note,
    PullRequest,
    Send,
    Stage,
    StepReport,
    Stop,
    Unstage,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer import Syncer
from tests.protocol.pair import Pair

FINGERPRINT = (("model", "abc"),)
NAMES = ("a", "b", "c")


def config(tau: int, quorum: int = 1) -> ProtocolConfig:
    return ProtocolConfig(
        sync_every=3, num_fragments=2, overlap_steps=tau, quorum=quorum, heartbeat_s=1.0, lease_s=4.0, resend_s=1.0
    )


small = st.integers(-1, 8)
adopted = st.lists(st.builds(Adopted, small, small, st.integers(0, 90)), min_size=1, max_size=3).map(tuple)
who = {"learner_id": st.sampled_from(NAMES), "incarnation": st.integers(1, 3)}
learner_messages = st.one_of(
    st.builds(
        Hello,
        **who,
        fingerprint=st.sampled_from([FINGERPRINT, FINGERPRINT, FINGERPRINT, ()]),
        versions=st.sampled_from([(-1, -1), (0, 0), (2, 3), (0,)]),
    ),
    st.builds(
        StepReport,
        **who,
        local_step=st.integers(1, 40),
        tokens=st.integers(0, 400),
        global_step=st.integers(0, 40),
        adopted=st.one_of(st.just((Adopted(0), Adopted(0))), adopted),
        step_s=st.floats(0.0, 5.0),
        loss=st.just(2.5),
    ),
    st.builds(
        FragmentValue,
        **who,
        global_step=small,
        fragment_id=small,
        local_step=st.integers(0, 40),
        steps=small,
        tokens=small,
        base_version=small,
        payload_bytes=st.just(0),
    ),
    st.builds(Heartbeat, **who),
    st.builds(Leave, **who, reason=st.just("")),
)
syncer_inputs = st.lists(
    st.one_of(
        learner_messages,
        learner_messages,
        learner_messages,
        st.tuples(st.just("tick"), st.floats(0.0, 6.0)),
        st.tuples(st.just("cut"), st.sampled_from(NAMES), st.integers(1, 3)),
        st.tuples(st.just("merged"), st.integers(0, 3)),
    ),
    max_size=60,
)


class Watch:
    """What must hold of a syncer's effects, whatever it is told."""

    def __init__(self, syncer: Syncer) -> None:
        self.syncer = syncer
        self.merging: list[int] = []
        self.merged: set[int] = set()
        self.clock = 0
        self.versions = list(syncer.versions)

    def see(self, effects: list[Effect], now_s: float) -> None:
        syncer = self.syncer
        for effect in effects:
            if isinstance(effect, Merge):
                assert effect.global_step not in self.merged, "merged twice"
                assert effect.parts and all(part.steps >= 1 and part.tokens >= 1 for part in effect.parts)
                assert [p.learner_id for p in effect.parts] == sorted({p.learner_id for p in effect.parts})
                self.merging.append(effect.global_step)
                self.merged.add(effect.global_step)
            elif isinstance(effect, Note) and effect.kind == "closed":
                assert len(effect.members) >= syncer.config.quorum, effect
                assert effect.global_step > self.clock, effect
                self.clock = effect.global_step
        assert len(syncer._rounds) <= max(1, syncer.config.overlap_steps)
        fragments = [r.fragment_id for r in syncer._rounds.values() if r.fragment_id >= 0]
        assert len(fragments) == len(set(fragments)), "two rounds of one fragment"
        assert all(new >= old for new, old in zip(syncer.versions, self.versions, strict=True))
        self.versions = list(syncer.versions)
        active = sum(m.state == "active" for m in syncer.membership.members.values())
        assert syncer.membership.live == active
        assert syncer.waiting_for(now_s)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(syncer_inputs, st.integers(0, 3), st.integers(1, 3))
def test_a_syncer_survives_anything(inputs: list[Any], tau: int, quorum: int) -> None:
    syncer = Syncer(config(tau, quorum), 12, FINGERPRINT)
    watch = Watch(syncer)
    now_s = 0.0
    for item in inputs:
        if isinstance(item, tuple) and item[0] == "tick":
            now_s += item[1]
            watch.see(syncer.on_tick(now_s), now_s)
            deadline_s = syncer.next_deadline_s()
            assert deadline_s is None or deadline_s > now_s, "the driver would spin"
        elif isinstance(item, tuple) and item[0] == "cut":
            watch.see(syncer.on_disconnect(item[1], item[2], "", now_s), now_s)
        elif isinstance(item, tuple) and item[0] == "merged":
            if watch.merging:
                watch.see(syncer.on_merged(watch.merging.pop(item[1] % len(watch.merging)), now_s), now_s)
        else:
            watch.see(syncer.on_message(item, now_s), now_s)


syncer_messages = st.one_of(
    st.builds(Welcome, small, st.just((0, 0))),
    st.builds(GlobalFragment, small, small, small, st.just(0)),
    st.builds(GlobalFragment, small, st.integers(0, 1), small, st.just(0)),
    st.builds(PullRequest, small, small, small),
    st.builds(PullRequest, small, st.integers(0, 1), small),
    st.builds(Advance, small),
    st.builds(Advance, small),
)
learner_inputs = st.lists(
    st.one_of(
        syncer_messages,
        st.sampled_from(["step", "step", "step", "connect", "disconnect", "tick"]),
        st.integers(0, 20).map(lambda n: Stop(9, "over") if n == 0 else "step"),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(learner_inputs, st.integers(0, 3))
def test_a_learner_survives_anything(inputs: list[Any], tau: int) -> None:
    learner = Learner("a", 1, config(tau), FINGERPRINT)
    held: dict[int, int] = {}
    staged: set[tuple[int, int]] = set()
    now_s, clock = 0.0, 0
    for item in inputs:
        now_s += 0.5
        if item == "step":
            effects = learner.on_step(10, 1.0, 2.5, now_s) if learner.may_step() else []
        elif item == "connect":
            effects = learner.on_connected(now_s)
        elif item == "disconnect":
            effects = learner.on_disconnected(now_s)
        elif item == "tick":
            effects = learner.on_tick(now_s)
            deadline_s = learner.next_deadline_s()
            assert deadline_s is None or deadline_s > now_s, "the driver would spin"
        else:
            effects = learner.on_message(item, now_s)
        for effect in effects:
            if isinstance(effect, Adopt):
                assert effect.version > held.get(effect.fragment_id, -1)
                held[effect.fragment_id] = effect.version
            elif isinstance(effect, Stage):
                staged.add((effect.fragment_id, effect.local_step))
            elif isinstance(effect, Unstage):
                staged.remove((effect.fragment_id, effect.local_step))
            elif isinstance(effect, Send) and isinstance(effect.message, FragmentValue):
                value = effect.message
                assert (value.fragment_id, value.local_step) in staged, "sent without a copy"
                assert value.steps >= 1 and value.tokens >= 1
        assert len(staged) <= 3 * 2, "copies are bounded"
        assert learner.global_step >= clock
        clock = learner.global_step
        if len(held) == 2 and tau > 0 and learner.state != STOPPED:
            assert learner.state == TRAINING, "a learner that holds everything never waits"
        assert len(held) == 2 or learner.state in (JOINING, STOPPED)
    if learner.state == STOPPED:
        assert not staged


commands = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from(NAMES)),
        st.tuples(st.just("step"), st.sampled_from(NAMES)),
        st.tuples(st.just("step"), st.sampled_from(NAMES)),
        st.tuples(st.just("wait"), st.floats(0.0, 6.0)),
        st.tuples(
            st.sampled_from(["cut", "restart", "hold", "release", "lose", "hold-merges", "merge"]),
            st.sampled_from(NAMES),
        ),
    ),
    max_size=40,
)


def execute(pair: Pair, command: str, argument: Any) -> None:
    match command:
        case "step":
            pair.step(argument)
        case "wait":
            pair.wait(argument)
        case "cut":
            if argument in pair.linked:
                pair.cut(argument)
            else:
                pair.connect(argument)
        case "restart":
            pair.join(argument, incarnation=pair.learners[argument].incarnation + 1)
        case "hold":
            pair.held.add(argument)
        case "release":
            pair.held.discard(argument)
            pair.deliver()
        case "lose":
            pair.lose_wire(argument)
        case "hold-merges":
            pair.holds_merges = True
        case "merge":
            pair.holds_merges = False
            pair.merge()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(commands, st.sampled_from([0, 1, 2, 4]), st.integers(1, 3))
def test_after_any_troubles_rounds_go_on(steps: list[tuple[str, Any]], tau: int, quorum: int) -> None:
    pair = Pair(total_steps=10_000, overlap_steps=tau, quorum=quorum, heartbeat_s=1.0, lease_s=4.0, resend_s=1.0)
    pair.join(*NAMES)
    for command, argument in steps:
        execute(pair, command, argument)
    pair.held.clear()  # everything heals
    pair.deliver()
    execute(pair, "merge", "")
    pair.connect(*(name for name in NAMES if name not in pair.linked))
    for _ in range(12):  # by then every timeout has passed
        pair.wait(4.0)
        pair.step(*NAMES)
    before = pair.syncer.merged_rounds
    for _ in range(8):
        pair.wait(1.0)
        pair.step(*NAMES)
        assert tau == 0 or all(learner.may_step() for learner in pair.learners.values())
    assert pair.syncer.merged_rounds > before, pair.syncer.waiting_for(pair.now_s)
    if tau > 0 or quorum == len(NAMES):  # lockstep has no grace window: with K = 1 the first to report is alone
        assert {name for names in pair.contributors()[before:] for name in names} == set(NAMES)
    pair.check_replay()
