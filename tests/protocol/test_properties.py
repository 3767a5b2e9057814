"""Any interleaving of inputs, from any peer, in any state: nothing raises, what is bounded stays bounded."""

from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.protocol.effects import (
    Adopt,
    AdoptState,
    Effect,
    Merge,
    Note,
    Send,
    Stage,
    StageState,
    Unstage,
    UnstageState,
)
from diloco_jax.protocol.learner.machine import JOINING, STOPPED, TRAINING, Learner
from diloco_jax.protocol.learner.recovery import STATES_MAX, Saved
from diloco_jax.protocol.messages import (
    Adopted,
    Advance,
    AnchorRequest,
    FragmentValue,
    GlobalFragment,
    Hello,
    LearnerMessage,
    Lease,
    PullRequest,
    StateChunk,
    StateEnd,
    StatePull,
    StateUnavailable,
    StepReport,
    Stop,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from tests.drawn import examples
from tests.protocol.drivers import check_fates
from tests.protocol.steady import STEADY

FINGERPRINT = (("model", "abc"),)
NAMES = ("a", "b", "c")


def config(tau: int, quorum: int = 1) -> ProtocolConfig:
    return ProtocolConfig(
        sync_every=3,
        num_fragments=2,
        overlap_steps=tau,
        quorum=quorum,
        heartbeat_s=1.0,
        silence_s=4.0,
        resend_s=1.0,
        release_s=9.0,
        restore_s=5.0,
        lease_ahead_steps=4,
        snapshot_every=2,
        strikes_max=2,
        unmerged_rounds_max=3,
    )


small = st.integers(-1, 8)
few = st.integers(0, 9)
names = st.sampled_from(NAMES)
# Fields of learners' messages; a field that is not listed takes small numbers.
FIELDS: dict[str, Any] = {
    "learner_id": names,
    "incarnation": st.integers(1, 3),
    "fingerprint": st.sampled_from([FINGERPRINT, FINGERPRINT, FINGERPRINT, ()]),
    "versions": st.sampled_from([(-1, -1), (0, 0), (2, 3), (0,)]),
    "digests": st.sampled_from([(0, 0), (0, 7)]),
    "epoch": st.integers(0, 2),
    "step_samples": st.integers(0, 3),
    "granted": few,
    "samples": few,
    "local_step": st.integers(0, 40),
    "adopted": st.one_of(
        st.just((Adopted(0), Adopted(0))),
        st.lists(st.builds(Adopted, small, small, st.integers(0, 90)), min_size=1, max_size=3).map(tuple),
    ),
    "step_s": st.floats(0.0, 5.0),
    "arrived": st.just(()),
    "donor": st.sampled_from(["", *NAMES]),
    "receiver": names,
    "reason": st.just("no"),
}


def anything(kind: Any, **special: Any) -> st.SearchStrategy[Any]:
    """Any message of a kind."""
    return st.builds(kind, **{name: (FIELDS | special).get(name, small) for name in kind._fields})


SANE: dict[str, Any] = {"fingerprint": st.just(FINGERPRINT), "digests": st.just((0, 0)), "epoch": st.just(0)}
SANE |= {"versions": st.just((0, 0)), "adopted": st.just((Adopted(0), Adopted(0))), "step_samples": st.just(1)}
SANE |= {"incarnation": st.just(1), "samples": st.just(0), "granted": few, "base_version": st.just(0)}
SANE |= {"steps": st.integers(1, 3), "tokens": st.integers(1, 9), "global_step": st.integers(1, 3)}
learner_messages = st.one_of(
    *map(anything, get_args(LearnerMessage)),
    *(anything(kind, **SANE) for kind in (Hello, Hello, StepReport, StepReport, FragmentValue, FragmentValue)),
)
syncer_inputs = st.lists(
    st.one_of(
        learner_messages,
        learner_messages,
        learner_messages,
        st.tuples(st.just("tick"), st.floats(0.0, 6.0)),
        st.tuples(st.just("cut"), names, st.integers(1, 3)),
        st.tuples(st.just("merged"), st.integers(0, 3), st.sets(names)),
        st.tuples(st.just("restart"), st.integers(0, 3)),
    ),
    min_size=20,
    max_size=60,
)


class Watch:
    """Rules for a syncer's effects after any inputs."""

    def __init__(self, syncer: Syncer) -> None:
        self.syncer = syncer
        self.merging: list[int] = []
        self.merged: set[int] = set()
        self.clock = 0
        self.versions = list(syncer.versions)
        # True after the syncer crashed and lost versions.
        self.lost = False

    def see(self, effects: list[Effect], now_s: float) -> None:
        syncer = self.syncer
        for effect in effects:
            if isinstance(effect, Merge):
                assert effect.global_step not in self.merged, "merged twice"
                assert effect.contributions and all(
                    each.steps >= 1 and each.tokens >= 1 for each in effect.contributions
                )
                assert [p.learner_id for p in effect.contributions] == sorted(
                    {p.learner_id for p in effect.contributions}
                )
                self.merging.append(effect.global_step)
                self.merged.add(effect.global_step)
            elif isinstance(effect, Note) and effect.kind == "closed":
                assert len(effect.members) >= syncer.config.quorum, effect
                assert effect.global_step > self.clock, effect
                self.clock = effect.global_step
        assert len(syncer.rounds.flying) <= max(1, syncer.config.overlap_steps)
        fragments = [r.fragment_id for r in syncer.rounds.flying.values() if r.fragment_id >= 0]
        assert len(fragments) == len(set(fragments)), "two rounds of one fragment"
        assert max(syncer.versions) <= syncer.global_step, "a version of a round that did not close"
        assert self.lost or all(new >= old for new, old in zip(syncer.versions, self.versions, strict=True))
        self.versions = list(syncer.versions)
        check_fates(syncer)
        active = sum(m.state == "active" for m in syncer.membership.members.values())
        assert syncer.membership.live == active
        assert syncer.waiting_for(now_s)


@settings(STEADY, max_examples=examples(150))
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
                global_step = watch.merging.pop(item[1] % len(watch.merging))
                members = syncer.rounds.flying[global_step].values
                excluded = tuple(sorted(item[2] & members.keys()))
                watch.see(syncer.on_merged(global_step, global_step, excluded, now_s), now_s)
        elif isinstance(item, tuple) and item[0] == "restart":
            watch.merging.clear()
            watch.lost = True
            held = [max(0, version - item[1]) for version in syncer.versions]
            watch.see(syncer.on_restart(held, held, now_s), now_s)
        else:
            watch.see(syncer.on_message(item, now_s), now_s)


epochs, mine, others = st.integers(1, 3), st.integers(0, 1), st.sampled_from(["b", "c", "d"])
syncer_messages = st.one_of(
    anything(Welcome, versions=st.just((0, 0)), epoch=epochs),
    anything(GlobalFragment, epoch=epochs, base=st.just(-1)),
    anything(GlobalFragment, fragment_id=mine, version=st.integers(0, 8), epoch=epochs, base=st.just(-1)),
    anything(GlobalFragment, fragment_id=mine, version=st.integers(0, 8), epoch=st.just(1), base=st.just(-1)),
    anything(GlobalFragment, fragment_id=mine, version=few, epoch=st.just(1), base=st.just(-1)),
    anything(Lease, first_sample=few, start=few, stop=st.integers(0, 30)),
    anything(Lease, first_sample=st.just(0), start=few, stop=st.integers(10, 30)),
    anything(PullRequest, local_step=small),
    anything(PullRequest, fragment_id=mine, local_step=small),
    anything(Advance),
    anything(AnchorRequest),
    anything(StatePull, receiver=others, donor_step=few, part=few),
    anything(StateEnd, receiver=others),
    anything(StateUnavailable, donor=st.sampled_from(["", "b"])),
    anything(
        StateChunk,
        learner_id=st.sampled_from(["b", "c"]),
        incarnation=st.just(1),
        receiver=st.sampled_from(["a", "a", "z"]),
        local_step=st.integers(1, 2),
        versions=st.sampled_from([(0, 0), (1, 2), (0,)]),
        part=st.integers(-1, 3),
        parts=st.integers(0, 3),
    ),
)
learner_inputs = st.lists(
    st.one_of(
        syncer_messages,
        syncer_messages,
        st.sampled_from(["step", "step", "step", "connect", "disconnect", "tick", "corrupt"]),
        st.integers(0, 20).map(lambda n: Stop(9, "over") if n == 0 else "step"),
    ),
    min_size=20,
    max_size=80,
)


class Looks:
    """Rules for a learner's effects after any inputs."""

    def __init__(self, learner: Learner, overlaps: bool) -> None:
        self.learner = learner
        self.overlaps = overlaps
        # fragment -> epoch and version
        self.held: dict[int, tuple[int, int]] = {}
        self.staged: set[tuple[int, int]] = set()
        self.states: set[int] = set()
        self.adopts = False
        self.clock = 0

    def see(self, effects: list[Effect], told: Any) -> None:
        for effect in effects:
            if isinstance(effect, Adopt):
                assert (told.epoch, effect.version) > self.held.get(effect.fragment_id, (0, -1))
                self.held[effect.fragment_id] = (told.epoch, effect.version)
            elif isinstance(effect, Stage):
                self.staged.add((effect.fragment_id, effect.local_step))
            elif isinstance(effect, Unstage):
                self.staged.remove((effect.fragment_id, effect.local_step))
            elif isinstance(effect, StageState):
                assert effect.local_step not in self.states
                self.states.add(effect.local_step)
            elif isinstance(effect, UnstageState):
                self.states.remove(effect.local_step)
            elif isinstance(effect, AdoptState):
                assert self.learner.local_step == 0 and len(self.held) == 2
                self.adopts = True
            elif isinstance(effect, Send):
                self._see_sent(effect.message)
        learner = self.learner
        assert len(self.staged) <= 3 * 2 and len(self.states) <= STATES_MAX, "copies are bounded"
        assert learner.global_step >= self.clock
        self.clock = learner.global_step
        assert len(self.held) == 2 or learner.state in (JOINING, STOPPED)
        if learner.local_step > 0 and learner.state != STOPPED and self.overlaps:
            assert learner.state == TRAINING, "a learner that has made a step never waits"

    def _see_sent(self, message: Any) -> None:
        if isinstance(message, FragmentValue):
            assert (message.fragment_id, message.local_step) in self.staged, "sent without a copy"
            assert message.steps >= 1 and message.tokens >= 1
        elif isinstance(message, StateChunk):
            assert message.local_step in self.states, "sent without a copy"


@settings(STEADY, max_examples=examples(150))
@given(learner_inputs, st.integers(0, 3), st.sampled_from([None, Saved(0, (0, 0)), Saved(40, (2, 3))]), st.booleans())
def test_a_learner_survives_anything(inputs: list[Any], tau: int, saved: Saved | None, usable: bool) -> None:
    learner = Learner("a", 1, config(tau), FINGERPRINT, saved=saved)
    looks = Looks(learner, tau > 0)
    now_s = 0.0
    for item in inputs:
        now_s += 0.5
        if item == "step":
            if learner.may_step():
                looks.see(learner.on_step(10, 1.0, 2.5, now_s, samples_end=learner.take_batch().end), item)
        elif item == "connect":
            looks.see(learner.on_connected(now_s), item)
        elif item == "disconnect":
            looks.see(learner.on_disconnected(now_s), item)
        elif item == "corrupt":
            learner.on_corrupt(now_s)
        elif item == "tick":
            looks.see(learner.on_tick(now_s), item)
            deadline_s = learner.next_deadline_s()
            assert deadline_s is None or deadline_s > now_s, "the driver would spin"
        else:
            looks.see(learner.on_message(item, now_s), item)
        if looks.adopts:
            looks.adopts = False
            looks.see(learner.on_state_adopted(usable, now_s), item)
    if learner.state == STOPPED:
        assert not looks.staged and not looks.states
