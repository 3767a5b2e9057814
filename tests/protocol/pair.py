"""Real machines joined by a fake wire without time; a test delivers messages in the order they were sent.

The pair also plays the drivers' part of the contract (drivers.py), and fails the test when a machine breaks it: a kept
payload is freed exactly once, what is sent is there, adopted versions only grow, rounds in flight stay bounded, every
sample has one fate, a tick never leaves a deadline that has passed, and a process that takes another's place is in its
state exactly.
"""

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from diloco_jax.protocol.effects import Adopt, Drop, Effect, Merge, Note, SaveSnapshot, SaveState, Send, Stage, Unstage
from diloco_jax.protocol.learner.machine import STOPPED, Learner
from diloco_jax.protocol.learner.recovery import Saved
from diloco_jax.protocol.messages import STOPPED_OUTSIDE, SYNCER, FragmentValue, Heartbeat, Message, Refuse
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import Moment, TapedSyncer, count_epochs, repeat_bans, replay
from tests.protocol.drivers import LearnerDriver, SyncerDriver, check_fates, saved_by
from tests.protocol.prose import effect_text, message_text

FINGERPRINT = (("model", "abc"), ("sync_every", "2"))
# Two fragments that take turns, learners that beat their hearts seldom, and that join without anybody's state: short
# transcripts. Stories of recovery turn it on.
SMALL: dict[str, Any] = {
    "sync_every": 2,
    "num_fragments": 2,
    "heartbeat_s": 5.0,
    "silence_s": 20.0,
    "resend_s": 10.0,
    "recover_from_peers": False,
}
STEP_SAMPLES = 2
STATE_PARTS = 2
STEP_BYTES = 10
TICKS_MAX = 1000


class Pair:
    """One syncer, any number of learners, and the wire between them.

    Args:
        fingerprint: what the syncer was built from; learners have FINGERPRINT unless they say otherwise.
        says_copies: whether `lines` tells of staged copies; the story is easier to follow without.
        steps: whether the syncer may send steps from version to version.
        run: id of the run; "" as if an older release had started it.
        config: settings that differ from SMALL and the defaults.
    """

    def __init__(
        self,
        *,
        total_steps: int = 100,
        fingerprint: tuple[tuple[str, str], ...] = FINGERPRINT,
        says_copies: bool = False,
        state_parts: int = STATE_PARTS,
        steps: bool = False,
        run: str = "",
        **config: Any,
    ) -> None:
        self.config = ProtocolConfig(**SMALL | config)
        self._fingerprint, self._total_steps, self._steps = fingerprint, total_steps, steps
        self.syncer = self._new_syncer()
        self.driver = SyncerDriver(self.config.num_fragments)
        self.tape: list[str] = []
        self._taped = TapedSyncer(self.syncer, self.tape.append)
        self.now_s = 0.0
        self.learners: dict[str, Learner] = {}
        self.drivers: dict[str, LearnerDriver] = {}
        # The states that learners have saved to disk.
        self.saved: dict[str, Saved] = {}
        self.linked: set[str] = set()
        # Senders whose messages wait on the wire: "a" holds everything, "a:StepReport" one kind of message.
        self.held: set[str] = set()
        self.holds_merges = False
        # Learners whose values cannot be used.
        self.poisoned: set[str] = set()
        # Learners that cannot use a state that they recover.
        self.broken: set[str] = set()
        # The syncer crashes after so many more inputs, once the line of the last one is on its tape.
        self.dies_in: int | None = None
        self.wire: deque[tuple[str, str, Message]] = deque()  # sender, receiver, message
        # All messages that were ever sent: sender, receiver, message.
        self.sent: list[tuple[str, str, Message]] = []
        # All effects that the syncer ever asked for.
        self.effects: list[Effect] = []
        # The same effects, one list for each input.
        self.history: list[list[Effect]] = []
        self.adoptions: list[tuple[str, int, int]] = []  # learner, fragment, version
        # The events of the run, as sentences.
        self.lines: list[str] = []
        self._says_copies = says_copies
        self._state_parts = state_parts
        self._run_syncer(self._taped.on_begin([value.digest for value in self.driver.values], self.now_s, run))

    def join(
        self,
        *names: str,
        incarnation: int = 1,
        fingerprint: tuple[tuple[str, str], ...] = FINGERPRINT,
        step_samples: int = STEP_SAMPLES,
    ) -> None:
        """Start learners and let them connect; a learner of the same name that still runs is killed."""
        for name in names:
            self._unlink(name)
            saved = self.saved.get(name)
            self.learners[name] = Learner(
                name, incarnation, self.config, fingerprint, step_samples=step_samples, saved=saved
            )
            self.drivers[name] = LearnerDriver(self.learners[name], self._state_parts)
            self._link(name)
        self.deliver()

    def step(self, *names: str, step_s: float = 1.0, tokens: int = 10) -> None:
        """Let each learner that may finish one inner step, then deliver everything that is not held."""
        for name in names:
            learner = self.learners[name]
            if not learner.may_step():
                self._say(f"{name} may not step: it is {learner.state}")
                continue
            batch = learner.take_batch()
            effects = learner.on_step(tokens, step_s, 2.5, self.now_s, samples_end=batch.end)
            self._say(f"{name} finishes step {learner.local_step}")
            self._run_learner(name, effects)
        self.deliver()

    def rounds(self, count: int, *names: str, step_s: float = 1.0) -> None:
        """Repeat `count` times: wait a second, then let each learner make a step."""
        for _ in range(count):
            self.wait(1.0)
            self.step(*names, step_s=step_s)

    def wait(self, seconds: float) -> None:
        """Let time pass: every deadline on the way gets its tick."""
        end_s = self.now_s + seconds
        for _ in range(TICKS_MAX):
            due = [d for d in self._deadlines() if d <= end_s]
            if not due:
                self.now_s = end_s
                return
            self.now_s = max(self.now_s, min(due))
            syncer = self.syncer
            self._run_syncer(self._taped.on_tick(self.now_s))
            deadline_s = syncer.next_deadline_s()
            assert deadline_s is None or deadline_s > self.now_s or syncer is not self.syncer, "the driver would spin"
            for name in sorted(self.linked):
                self._run_learner(name, self.learners[name].on_tick(self.now_s))
            self.deliver()
        raise AssertionError(f"{TICKS_MAX} ticks within {seconds} s")

    def deliver(self) -> None:
        """Deliver messages until only held ones are under way."""
        waiting: deque[tuple[str, str, Message]] = deque()
        while self.wire:
            item = self.wire.popleft()
            if _keys(item) & self.held:
                waiting.append(item)
            else:
                self.arrive(*item)
        self.wire = waiting

    def let_pass(self, key: str) -> None:
        """Deliver the oldest message that `held` holds back under this key."""
        item = next(item for item in self.wire if key in _keys(item))
        self.wire.remove(item)
        self.arrive(*item)
        self.deliver()

    def arrive(self, sender: str, receiver: str, message: Message) -> None:
        """Hand one message to its receiver, in or out of turn."""
        if not isinstance(message, Heartbeat):
            self._say(f"{sender} -> {receiver}: {message_text(message)}")
        if receiver == SYNCER:
            effects = self._taped.on_message(message, self.now_s)  # type: ignore[arg-type]
            if isinstance(message, FragmentValue) and not any(
                isinstance(e, Drop) and e[::2] == (sender, -1) for e in effects
            ):
                self.driver.keep(message.global_step, sender)
            self._run_syncer(effects, message)
            return
        for given in self.drivers[receiver].given(message, self.driver.bases, self.now_s):  # type: ignore[arg-type]
            self._run_learner(receiver, given.effects, given.message)

    def merge(self) -> None:
        """Finish the merges that were held."""
        while self.driver.orders:
            self._merge(next(iter(self.driver.orders)))
            self.deliver()

    def cut(self, *names: str, reason: str = "connection reset") -> None:
        """Break the link of each learner; both sides notice it, and messages under way are lost."""
        for name in names:
            self._unlink(name)
            self._run_learner(name, self.learners[name].on_disconnected(self.now_s))
            self._lose(name, reason, self.learners[name].incarnation)
        self.deliver()

    def crash(self, *names: str, reason: str = "connection reset") -> None:
        """Kill learners; only the syncer can notice it."""
        for name in names:
            self._unlink(name)
            self._lose(name, reason, self.learners.pop(name).incarnation)
        self.deliver()

    def connect(self, *names: str) -> None:
        """Let the same learners connect again with the values that they hold."""
        for name in names:
            self._link(name)
        self.deliver()

    def leave(self, *names: str, reason: str = STOPPED_OUTSIDE) -> None:
        for name in names:
            self._run_learner(name, self.learners[name].leave(reason, self.now_s))
        self.deliver()

    def drain(self, *names: str) -> None:
        """Let an operator ask the syncer to drain these learners."""
        for name in names:
            for effect in self._taped.on_drain(name, self.now_s):
                self._execute(effect, None)
        self.deliver()

    def ban(self, name: str, why: str = "bad data") -> None:
        """Let an operator ban a learner."""
        self._run_syncer(self._taped.on_ban(name, why, self.now_s))
        self.deliver()

    def admit(self, name: str) -> None:
        """Let an operator admit a learner again."""
        self._run_syncer(self._taped.on_admit(name, self.now_s))

    def lose_wire(self, name: str) -> list[Message]:
        """Lose all messages from and to the learner; neither side notices it."""
        lost = [message for sender, receiver, message in self.wire if name in (sender, receiver)]
        for message in lost:
            # Heartbeats come by themselves and would drown the rest.
            if not isinstance(message, Heartbeat):
                self._say(f"never arrives: {message_text(message)}")
        self.wire = deque(item for item in self.wire if name not in item[:2])
        return lost

    def restart_syncer(self, lost_lines: int = 0) -> None:
        """Kill the syncer's process, and start another with its newest snapshot and its tape.

        Args:
            lost_lines: lines at the end of the tape that never reached the disk: the machine's power failed.
        """
        self.dies_in = None
        self._say("the syncer is killed, and another takes its place")
        before = json.dumps(self.syncer.state(), sort_keys=True)
        for name in sorted(self.linked):
            self._unlink(name)
            self._run_learner(name, self.learners[name].on_disconnected(self.now_s))
        kept = len(self.tape) - lost_lines
        del self.tape[kept:], self.history[kept:]
        self.driver.die()
        self.syncer = self._new_syncer()
        states = {Moment(snapshot.global_step): json.loads(snapshot.state) for snapshot in self.driver.snapshots}
        newest = self.driver.snapshots[-1] if self.driver.snapshots else None
        if newest is not None:
            self.syncer.restore(json.loads(newest.state))
        for _ in replay(self.tape[newest.tape_lines if newest is not None else 0 :], self.syncer, states):
            pass
        after = json.dumps(self.syncer.state(), sort_keys=True)
        assert lost_lines or after == before, "the tape leads to another state"
        self._taped = TapedSyncer(self.syncer, self.tape.append)
        held, digests = zip(*self.driver.values, strict=True)
        loaded = newest.global_step if newest is not None else -1
        self._run_syncer(self._taped.on_restart(held, digests, loaded, self.now_s))

    def rewind(self, *spared: str) -> None:
        """Kill every process but the spared ones, and resume the run from its newest snapshot."""
        self._say(f"everybody {'else ' if spared else ''}is killed; the run resumes from its newest snapshot")
        for name, learner in list(self.learners.items()):
            self._unlink(name)
            if name in spared:
                self._run_learner(name, learner.on_disconnected(self.now_s))
            else:
                del self.learners[name]
        self.driver.die()
        newest = self.driver.snapshots[-1]
        self.syncer = self._new_syncer()
        repeat_bans(self.tape, self.syncer)
        self._taped = TapedSyncer(self.syncer, self.tape.append)
        epoch = count_epochs(self.tape) + 1
        self._run_syncer(self._taped.on_rewind(json.loads(newest.state), newest.global_step, epoch, self.now_s))

    def merges(self) -> list[Merge]:
        return [effect for effect in self.effects if isinstance(effect, Merge)]

    def notes(self, kind: str) -> list[Note]:
        return [effect for effect in self.effects if isinstance(effect, Note) and effect.kind == kind]

    def drops(self) -> list[str]:
        return [effect.reason for effect in self.effects if isinstance(effect, Drop)]

    def messages(self, kind: type[Message], name: str = "") -> list[Any]:
        """Return the sent messages of one kind, by or to the learner if one is named."""
        return [m for sender, receiver, m in self.sent if isinstance(m, kind) and name in ("", sender, receiver)]

    def contributors(self) -> list[tuple[str, ...]]:
        """Return the names of the merged learners, round by round."""
        return [tuple(each.learner_id for each in merge.contributions) for merge in self.merges()]

    def check_replay(self) -> None:
        """Check that a fresh syncer makes the same effects from the tape, input by input."""
        assert list(replay(self.tape, self._new_syncer())) == self.history

    def check_bits(self) -> None:
        """Check that each learner with the newest version of a fragment holds the same bits as the syncer."""
        for name in self.linked:
            for fragment_id, anchor in self.drivers[name].anchors.items():
                newest = self.driver.values[fragment_id]
                assert anchor.version != newest.version or anchor == newest, f"{name}: {anchor}, newest is {newest}"

    def _new_syncer(self) -> Syncer:
        delta_bytes = dict.fromkeys(range(self.config.num_fragments) if self._steps else (), STEP_BYTES)
        return Syncer(self.config, self._total_steps, self._fingerprint, delta_bytes=delta_bytes)

    def _link(self, name: str) -> None:
        assert name not in self.linked, f"{name} is connected"
        self.linked.add(name)
        self._run_learner(name, self.learners[name].on_connected(self.now_s))

    def _unlink(self, name: str) -> None:
        self.linked.discard(name)
        self.lose_wire(name)

    def _lose(self, name: str, reason: str, incarnation: int) -> None:
        self._run_syncer(self._taped.on_disconnect(name, incarnation, reason, self.now_s))

    def _run_learner(self, name: str, effects: list[Effect], handled: Message | None = None) -> None:
        learner, driver = self.learners[name], self.drivers[name]
        for effect in effects:
            if isinstance(effect, Send):
                message = driver.fill(effect.message)
                if message is not None:
                    self._send(name, effect.peer, message)
                continue
            driver.execute(effect, handled)
            if self._says_copies or not isinstance(effect, Stage | Unstage):
                self._say(f"    {name} {effect_text(effect)}")
            if isinstance(effect, Adopt):
                self.adoptions.append((name, effect.fragment_id, effect.version))
            elif isinstance(effect, SaveState):
                self.saved[name] = saved_by(effect, learner)
        if learner.state == STOPPED:
            self.linked.discard(name)
        elif driver.state_adopted is not None:
            driver.state_adopted = None
            self._run_learner(name, learner.on_state_adopted(name not in self.broken, self.now_s))

    def _run_syncer(self, effects: list[Effect], handled: Message | None = None) -> None:
        self.history.append(effects)
        self.effects += effects
        if self.dies_in is not None:
            self.dies_in -= 1
            # The decision is on the tape, and its effects never happen.
            if self.dies_in < 0:
                self.restart_syncer()
                return
        for effect in effects:
            self._execute(effect, handled)
        in_flight = len(self.syncer.rounds.flying)
        assert in_flight <= max(1, self.config.overlap_steps), f"{in_flight} rounds in flight"
        check_fates(self.syncer)
        if not self.holds_merges:
            for order in [effect for effect in effects if isinstance(effect, Merge)]:
                if order.global_step in self.driver.orders:
                    self._merge(order.global_step)

    def _execute(self, effect: Effect, handled: Message | None) -> None:
        if isinstance(effect, Send):
            self.driver.check_sent(effect.message, handled)
            self._send(SYNCER, effect.peer, effect.message)
            return
        self._say(f"    {SYNCER} {effect_text(effect)}")
        self.driver.execute(effect, handled)
        if isinstance(effect, SaveSnapshot):
            self.driver.save(effect.global_step, self.syncer, len(self.tape))

    def _merge(self, global_step: int) -> None:
        digest, excluded = self.driver.merge(global_step, self.syncer.epoch, self.poisoned)
        self._run_syncer(self._taped.on_merged(global_step, digest, excluded, self.now_s))

    def _send(self, sender: str, receiver: str, message: Message) -> None:
        name = receiver if sender == SYNCER else sender
        self.sent.append((sender, receiver, message))
        if name in self.linked or (isinstance(message, Refuse) and name in self.learners):
            self.wire.append((sender, receiver, message))

    def _deadlines(self) -> Iterator[float]:
        machines = [self.syncer, *(self.learners[name] for name in self.linked)]
        for machine in machines:
            deadline_s = machine.next_deadline_s()
            if deadline_s is not None:
                yield deadline_s

    def _say(self, text: str) -> None:
        self.lines.append(text)


def _keys(item: tuple[str, str, Message]) -> set[str]:
    sender, receiver, message = item
    name = receiver if sender == SYNCER else sender
    return {name, f"{name}:{type(message).__name__}"}
