"""Both machines against a small model, driven by rules: whatever happens in whatever order, and then it ends well.

One real syncer and three real learners on a wire that delivers, loses and repeats what the rules say. The model knows
three things: the values of each fragment, the learners that hold them, and the owner of each sample. pair.py and
drivers.py add what drivers may expect of a machine.
"""

import contextlib
import json
from collections.abc import Iterator

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diloco_jax.protocol.learner.machine import STOPPED
from diloco_jax.protocol.messages import Lease
from tests.drawn import TIMES, examples
from tests.protocol.pair import Pair

NAMES = ("a", "b", "c")
TOTAL_STEPS = 24
# The wire loses its oldest messages beyond this number.
WIRE_MAX = 400
INCARNATIONS_MAX = 12  # of one learner
# A run must complete within so many rounds of steps after its last fault.
HEALING_MAX = 400

Incarnation = tuple[str, int]


class Machine(RuleBasedStateMachine):
    """Random inputs and faults for a syncer and three learners, checked against a small model."""

    @initialize(
        tau=st.sampled_from([0, 1, 2]),
        quorum=st.sampled_from([1, 1, 2]),
        fragments=st.sampled_from([1, 2, 3]),
        snapshot_every=st.sampled_from([0, 2, 5]),
        recovers=st.booleans(),
    )
    def begin(self, tau: int, quorum: int, fragments: int, snapshot_every: int, recovers: bool) -> None:
        self.pair = Pair(
            total_steps=TOTAL_STEPS,
            sync_every=3,
            num_fragments=fragments,
            overlap_steps=tau,
            quorum=quorum,
            snapshot_every=snapshot_every,
            recover_from_peers=recovers,
            lease_ahead_steps=4,
            heartbeat_s=2.0,
            silence_s=6.0,
            resend_s=1.0,
            pull_timeout_s=5.0,
            restore_s=4.0,
            release_s=8.0,
            recovery_attempts=2,
            strikes_max=2,
        )
        self.pair.held = set(NAMES)
        self.pair.holds_merges = True
        self.incarnations = dict.fromkeys(NAMES, 0)
        # Number of times that the run went back to a snapshot.
        self.lineage = 0
        # (lineage, fragment, version) -> digest
        self.made: dict[tuple[int, int, int], int] = {}
        # incarnation of a learner -> its sample -> index
        self.samples: dict[Incarnation, dict[int, int]] = {}
        # Number of messages that the model has counted.
        self.seen = 0
        self.begun = True

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        """Start a new process; an older one of this name ends without a message."""
        if self.incarnations[name] < INCARNATIONS_MAX:
            self.incarnations[name] += 1
            self.pair.join(name, incarnation=self.incarnations[name], step_samples=1 + NAMES.index(name))

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
    def step(self, names: list[str]) -> None:
        self.pair.step(*(name for name in names if name in self.pair.learners))

    @rule(name=st.sampled_from(NAMES))
    def crash(self, name: str) -> None:
        if name in self.pair.learners:
            self.pair.crash(name)

    @rule(name=st.sampled_from(NAMES))
    def cut(self, name: str) -> None:
        if name in self.pair.linked:
            self.pair.cut(name)

    @rule(name=st.sampled_from(NAMES))
    def connect(self, name: str) -> None:
        if name in self.absent():
            self.pair.connect(name)

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name: str) -> None:
        if any(member.learner_id == name for member in self.pair.syncer.membership.connected()):
            self.pair.drain(name)

    @rule(name=st.sampled_from(NAMES))
    def ban(self, name: str) -> None:
        # Another learner must be live, and the name not be banned.
        with contextlib.suppress(ValueError):
            self.pair.ban(name)

    @rule(name=st.sampled_from(NAMES))
    def admit(self, name: str) -> None:
        with contextlib.suppress(ValueError):
            self.pair.admit(name)

    @rule(name=st.sampled_from(NAMES), useless=st.booleans())
    def poison(self, name: str, useless: bool) -> None:
        (self.pair.poisoned.add if useless else self.pair.poisoned.discard)(name)

    @rule(name=st.sampled_from(NAMES), useless=st.booleans())
    def break_states(self, name: str, useless: bool) -> None:
        (self.pair.broken.add if useless else self.pair.broken.discard)(name)

    def absent(self) -> list[str]:
        """Learners that run without a link."""
        running = [name for name, learner in self.pair.learners.items() if learner.state != STOPPED]
        return [name for name in running if name not in self.pair.linked]

    @rule(count=st.integers(1, 60))
    def deliver(self, count: int) -> None:
        """The oldest messages arrive, in their order."""
        for _ in range(min(count, len(self.pair.wire))):
            if not self.pair.wire:
                return
            self.pair.arrive(*self.pair.wire.popleft())

    @precondition(lambda self: self.pair.wire)
    @rule(data=st.data())
    def overtake(self, data: st.DataObject) -> None:
        """Any message arrives."""
        index = data.draw(st.integers(0, len(self.pair.wire) - 1), "which")
        item = self.pair.wire[index]
        del self.pair.wire[index]
        self.pair.arrive(*item)

    @precondition(lambda self: self.pair.wire)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.pair.wire[data.draw(st.integers(0, len(self.pair.wire) - 1), "which")]

    @precondition(lambda self: self.pair.wire)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.pair.wire.append(self.pair.wire[data.draw(st.integers(0, len(self.pair.wire) - 1), "which")])

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.pair.wait(seconds)
        while len(self.pair.wire) > WIRE_MAX:
            self.pair.wire.popleft()

    @rule()
    def merge(self) -> None:
        self.pair.merge()

    @rule()
    def restart(self) -> None:
        """Kill the syncer's process; another one resumes from its newest snapshot and its tape."""
        self.pair.restart_syncer()

    @precondition(lambda self: self.pair.driver.snapshots and not self.pair.syncer.finished)
    @rule()
    def rewind(self) -> None:
        """Kill every process; the run resumes from its newest snapshot."""
        self.pair.rewind()
        self.lineage += 1

    @rule()
    def look(self) -> None:
        """A machine that restored the state has the state."""
        plain = json.dumps(self.pair.syncer.state())
        other = self.pair._new_syncer()
        other.restore(json.loads(plain))
        assert json.dumps(other.state()) == plain

    @invariant()
    def a_version_is_one_value(self) -> None:
        """A version has one value everywhere, and the syncer's driver holds each version that the syncer claims."""
        pair = self.pair
        for fragment_id, (version, digest) in enumerate(pair.driver.values):
            assert self.made.setdefault((self.lineage, fragment_id, version), digest) == digest
        if not pair.syncer.restoring:
            told = list(zip(pair.syncer.versions, pair.syncer.digests, strict=True))
            assert told == [tuple(value) for value in pair.driver.values]
        for name in pair.learners:
            for fragment_id, (version, digest) in pair.drivers[name].anchors.items():
                assert self.made.get((self.lineage, fragment_id, version)) == digest, f"{name} holds {version}"

    @invariant()
    def who_trains_holds_everything(self) -> None:
        for name, learner in self.pair.learners.items():
            if learner.local_step or learner.may_step():
                assert len(self.pair.drivers[name].anchors) == self.pair.config.num_fragments, name
            if learner.local_step and not self.pair.config.lockstep:
                assert learner.may_step() or learner.state == STOPPED, f"{name} waits as {learner.state}"

    @invariant()
    def every_index_is_one_incarnation_s(self) -> None:
        """A sample of a process keeps its index, and no index is leased twice, or leased and free."""
        pair = self.pair
        for _, receiver, message in pair.sent[self.seen :]:
            if isinstance(message, Lease):
                samples = self.samples.setdefault((receiver, self.incarnations[receiver]), {})
                for sample, index in zip(_range(message), range(message.start, message.stop), strict=True):
                    assert samples.setdefault(sample, index) == index, f"{receiver} has {index} as sample {sample}"
        self.seen = len(pair.sent)
        book = pair.syncer.leases.of("")
        fates, out = book.fates, [i for holding in book.holdings.values() for i in _indices(holding.ranges)]
        free = list(_indices(book.state()["pool"]))
        assert len(set(out + free)) == len(out) + len(free)
        assert fates.leased == sum(fates[1:]) and fates.out == len(out)

    @invariant()
    def no_banned_learner_is_connected(self) -> None:
        connected = {member.learner_id for member in self.pair.syncer.membership.connected()}
        assert not connected & {name for name, _ in self.pair.syncer.membership.bans}

    @invariant()
    def rounds_are_few(self) -> None:
        assert len(self.pair.syncer.rounds.flying) <= max(1, self.pair.config.overlap_steps)

    def teardown(self) -> None:
        """Complete the run without further faults, and check that its tape leads to the same decisions."""
        if not hasattr(self, "begun"):
            return
        pair = self.pair
        pair.held.clear()
        pair.poisoned.clear()
        pair.broken.clear()
        pair.holds_merges = False
        pair.wire.clear()
        pair.merge()
        for name in NAMES:
            with contextlib.suppress(ValueError):
                pair.admit(name)
        for _ in range(HEALING_MAX):
            if pair.syncer.finished:
                break
            for name in self.absent():
                pair.connect(name)
            for name in NAMES:
                if name not in pair.linked:
                    self.incarnations[name] += 1
                    pair.join(name, incarnation=self.incarnations[name])
            pair.step(*NAMES)
            pair.wait(1.0)
        assert pair.syncer.finished, f"it never completes: {pair.syncer.waiting_for(pair.now_s)}"
        self.a_version_is_one_value()
        self.every_index_is_one_incarnation_s()
        pair.check_replay()


def _range(lease: Lease) -> range:
    return range(lease.first_sample, lease.first_sample + lease.stop - lease.start)


def _indices(ranges: list[tuple[int, int]]) -> Iterator[int]:
    return (index for start, stop in ranges for index in range(start, stop))


TestRules = Machine.TestCase
TestRules.settings = settings(
    max_examples=examples(60),
    stateful_step_count=50,
    deadline=None,
    derandomize=TIMES == 1,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
