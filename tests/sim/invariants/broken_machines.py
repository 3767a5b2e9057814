"""Machines that break one rule each of recovery, failover, quarantine and leases; test_checkers.py has the others."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from diloco_jax.protocol.effects import AdoptState, Contribution, Effect, Effects, Merge, Send, UnstageState
from diloco_jax.protocol.learner.anchors import STALE
from diloco_jax.protocol.learner.machine import RECOVERING, TRAINING, Learner, ScheduleClock
from diloco_jax.protocol.learner.recovery import Start
from diloco_jax.protocol.learner.stager import Stager
from diloco_jax.protocol.learner.waiting import FragmentWait
from diloco_jax.protocol.leases import Batch, LeaseBook, LeaseBooks
from diloco_jax.protocol.member import Held, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import (
    NO_VERSION,
    Expel,
    GlobalFragment,
    Hello,
    PullRequest,
    Score,
    StateChunk,
    StepReport,
    SyncerMessage,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.book import RoundBook
from diloco_jax.protocol.syncer.comeback import Comeback
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.progress import Downstream, Progress
from diloco_jax.protocol.syncer.roster import Roster
from diloco_jax.protocol.syncer.round import Round


def having(part: type, make: type[Syncer] | type[Learner]) -> Callable[..., Any]:
    """Return a function that makes machines with one broken component."""

    # The machine has several books of leases, which are made beside their class.
    maker = LeaseBook if issubclass(part, LeaseBook) else make.__mro__[-2]

    def make_machine(*args: Any, **kwargs: Any) -> Syncer | Learner:
        with patch.object(sys.modules[maker.__module__], part.__mro__[1].__name__, part):
            return make(*args, **kwargs)

    return make_machine


class Diligent(Syncer):
    """Syncer that repeats a merge which was under way when it crashed."""

    def on_restart(self, *args: Any) -> list[Effect]:
        again = [
            Merge(this.global_step, this.fragment_id, tuple(part for _, part in sorted(this.values.items())))
            for this in self.rounds.flying.values()
            if this.phase == "merging"
        ]
        return super().on_restart(*args) + again


class Lenient(Syncer):
    """Counts values that were left out."""

    def on_merged(self, global_step: int, digest: int, excluded: tuple[str, ...], now_s: float) -> list[Effect]:
        return super().on_merged(global_step, digest, (), now_s)


class Flatterer(Downstream):
    """Tells everybody that every version holds a value of theirs."""

    def _message(self, *args: Any) -> GlobalFragment:
        message = super()._message(*args)
        return message._replace(merged_round=message.version)


class Discreet(Downstream):
    """Downstream part that does not report whose values a version contains."""

    def _message(self, *args: Any) -> GlobalFragment:
        return super()._message(*args)._replace(merged_round=NO_VERSION)


class Patient(Syncer):
    """Never parts with a learner whose values are of no use."""

    def __init__(self, config: ProtocolConfig, *args: Any, **others: Any) -> None:
        super().__init__(replace(config, strikes_max=1000), *args, **others)


class Forgiving(Roster):
    """Takes messages of those that it has expelled."""

    def lose(self, member: Any, state: str, reason: str, now_s: float) -> None:
        if reason != "expelled":
            super().lose(member, state, reason, now_s)


class Keepsake(RoundBook):
    """Keeps the values of a learner that is banned while a round waits for others."""

    def withdraw(self, member: Member) -> None:
        pass


class Hospitable(Membership):
    """Lets banned learners in."""

    def refusal(self, hello: Hello, *args: Any) -> str:
        refusal = super().refusal(hello, *args)
        return "" if "is banned" in refusal else refusal


class Regretful(Syncer):
    """Takes bans back when it goes back to a snapshot."""

    def go_back(self, state: Mapping[str, Any]) -> None:
        self.restore(state)


class Secretive(Roster):
    """Does not tell a learner that it is banned."""

    def ban(self, learner_id: str, why: str, now_s: float) -> None:
        super().ban(learner_id, why, now_s)
        expels = [e for e in self.effects if isinstance(e, Send) and isinstance(e.message, Expel)]
        for effect in expels:
            self.effects.remove(effect)


class Greedy(Learner):
    """Takes a state over before it is whole."""

    def on_message(self, message: SyncerMessage, now_s: float) -> list[Effect]:
        if isinstance(message, StateChunk) and self.state == RECOVERING:
            message = message._replace(parts=max(1, message.parts - 1))
        return super().on_message(message, now_s)


class Unasked(Learner):
    """Gives its state before it has seen what its receiver has."""

    def _serve(self) -> None:
        if self.local_step > 0 and self.state == TRAINING:
            self.donor.serve(1_000_000, self.local_step)


class Fanciful(Learner):
    """Tells of versions that it has not evaluated."""

    def on_evaluated(self, found: Score, now_s: float) -> list[Effect]:
        return [
            e._replace(message=e.message._replace(versions=tuple([v + 1 for v in e.message.versions])))
            if isinstance(e, Send) and isinstance(e.message, Score)
            else e
            for e in super().on_evaluated(found, now_s)
        ]


class Uncritical(Learner):
    """Takes all parameters of a donor, whatever global values they are based on."""

    def _update_state(self, now_s: float) -> None:
        super()._update_state(now_s)
        everything = tuple(range(self._config.num_fragments))
        for effect in self._effects.drain():
            self._effects.append(effect._replace(fragments=everything) if isinstance(effect, AdoptState) else effect)


class Hoards(Learner):
    """Never frees the copy of a whole state."""

    def on_message(self, message: SyncerMessage, now_s: float) -> list[Effect]:
        return [e for e in super().on_message(message, now_s) if not isinstance(e, UnstageState)]


class Slow(Start):
    """Takes an old state for a young one."""

    def __init__(self, effects: Effects, learner_id: str, incarnation: int, config: ProtocolConfig, *args: Any) -> None:
        super().__init__(effects, learner_id, incarnation, replace(config, sync_every=1000), *args)


class GivesTwice(LeaseBook):
    """Leases the beginning of the order to everybody."""

    def _take(self, count: int) -> tuple[int, int]:
        self._next = 0
        return super()._take(count)


class Mixes(LeaseBooks):
    """Leases all corpora from one order."""

    def of(self, corpus: str) -> LeaseBook:
        return super().of("")


class Boundless(LeaseBook):
    """Leases positions beyond the numbers that a message can carry."""

    def _take(self, count: int) -> tuple[int, int]:
        start, stop = super()._take(count)
        return start + (1 << 62), stop + (1 << 62)


class Optimist(LeaseBook):
    """Believes that every merge arrives."""

    def on_merged(self, learner_id: str, fragment_id: int, version: int, samples: int, since: int = 0) -> None:
        super().on_merged(learner_id, fragment_id, version, samples, since)
        self.confirm(fragment_id, version)


class Overcounter(LeaseBook):
    """Counts as merged what adoption has overwritten."""

    def on_merged(self, learner_id: str, fragment_id: int, version: int, samples: int, since: int = 0) -> None:
        super().on_merged(learner_id, fragment_id, version, samples)


class Adrift(Learner):
    """Reads beside what was leased to it."""

    def take_batch(self) -> Batch:
        ranges, end = super().take_batch()
        return Batch(tuple((start + 1, stop + 1) for start, stop in ranges), end)


class Liar(Syncer):
    """Says that its values have another digest after a restart."""

    def on_restart(self, *args: Any) -> list[Effect]:
        effects = super().on_restart(*args)
        self.downstream.digests = [digest + 1 for digest in self.digests]
        return effects


class Careless(Comeback):
    """Does not wait for what learners bring after a restart."""

    def restart(self, *args: Any) -> None:
        super().restart(*args)
        if self.restoring is not None:
            self.restoring.deadline_s = args[-1] + 2.5

    def ask(self, *args: Any) -> None:
        pass


class Gullible(Learner):
    """Applies every step, whatever it holds."""

    def wants(self, message: GlobalFragment, now_s: float) -> bool:
        return self.heads.judge(message) != STALE


class Wasteful(Downstream):
    """Sends every value whole, although it could send steps."""

    def send(self, member: Member, fragment_id: int, *args: Any, **kwargs: Any) -> None:
        member.down.will_hold[fragment_id] = Held(NO_VERSION, 0)
        super().send(member, fragment_id, *args, **kwargs)


class Presumptuous(Downstream):
    """Believes that everybody holds what a step starts from."""

    def send(self, member: Member, fragment_id: int, *args: Any, **kwargs: Any) -> None:
        if fragment_id in self.bases:
            member.down.will_hold[fragment_id] = self.bases[fragment_id]
        super().send(member, fragment_id, *args, **kwargs)


class Insistent(Downstream):
    """Sends the same step again and again."""

    def send(self, member: Member, fragment_id: int, *args: Any, **kwargs: Any) -> None:
        member.down.sent.pop(fragment_id, None)
        super().send(member, fragment_id, *args, **kwargs)


class Insisting(RoundBook):
    """Asks members that owe answers in every round."""

    def _late(self, now_s: float) -> set[str]:
        return set()


class Boastful(RoundBook):
    """Gives a reason that counts one learner more than the round has."""

    def _close(self, this: Round, late: set[str], reason: str, now_s: float) -> None:
        super()._close(this, late, reason.replace("all 4", "all 5"), now_s)


class Silent(RoundBook):
    """Gives no reason for closing a round."""

    def _close(self, this: Round, late: set[str], reason: str, now_s: float) -> None:
        super()._close(this, late, "", now_s)


class Confused(Downstream):
    """Names another base than that of the step which its driver has."""

    def _message(self, *args: Any) -> GlobalFragment:
        message = super()._message(*args)
        return message._replace(base=message.base + (message.base > 0))


class ForgetsRounds(Syncer):
    """Leaves what is in flight out of its state."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "fresh": []}


class Hesitant(Learner):
    """Waits for a state for good."""

    def _update_state(self, now_s: float) -> None:
        if self.state != RECOVERING:
            super()._update_state(now_s)


class Polite(Learner):
    """Waits for the fragment it was asked for, although steps overlap."""

    waits = False

    def may_step(self) -> bool:
        return super().may_step() and not self.waits

    def _on_pull(self, message: PullRequest, now_s: float) -> None:
        self.waits = True
        super()._on_pull(message, now_s)

    def _on_global(self, message: GlobalFragment, now_s: float) -> None:
        self.waits = False
        super()._on_global(message, now_s)


class Lingering(FragmentWait):
    """Waits for twice as long as it may."""

    @property
    def limit_s(self) -> float:
        return 2 * super().limit_s


class Lonely(FragmentWait):
    """Continues to wait for a fragment of a link that is lost."""

    def stop(self) -> None:
        pass


class Undecided(FragmentWait):
    """Waits for a round although no fragment is due."""

    def on_report(self, first: bool, step_s: float, open_round: int, now_s: float) -> None:
        super().on_report(first, step_s, open_round, now_s)
        self.deadline_s = now_s + self.limit_s if self.limit_s else self.deadline_s


class Overdue(FragmentWait):
    """Does not see that a round is over."""

    def on_over(self, newest: int, now_s: float) -> None:
        pass


class Repetitive(FragmentWait):
    """Waits in each step for a round that takes several."""

    def on_report(self, first: bool, step_s: float, open_round: int, now_s: float) -> None:
        self._round = 0
        super().on_report(first, step_s, open_round, now_s)


class Distracted(Learner):
    """Takes the clock of a pull over while a step runs."""

    def _on_pull(self, message: PullRequest, now_s: float) -> None:
        self.global_step = max(self.global_step, message.global_step)
        super()._on_pull(message, now_s)


class Partial(Syncer):
    """Forgets one member in its broadcasts."""

    def on_merged(self, global_step: int, digest: int, excluded: Sequence[str], now_s: float) -> list[Effect]:
        effects = super().on_merged(global_step, digest, excluded, now_s)
        return [e for e in effects if not (isinstance(e, Send) and _forgotten(e))]


class Unhelpful(Downstream):
    """Does not hear it complain."""

    def missing(self, hello: Hello) -> list[int]:
        return [] if hello.learner_id == "island-3" and self.progress.global_step else super().missing(hello)

    def repair(self, *args: Any) -> None:
        pass


class Overbooking(Progress):
    """Opens rounds although those in flight may bring the last tokens."""

    def allows(self, global_step: int, tokens: int) -> bool:
        return super().allows(global_step, self.merged_tokens)


class Generous(RoundBook):
    """Counts what a value holds, counted before or not."""

    def credit(self, this: Round, parts: Sequence[Contribution]) -> list[Member]:
        self.progress.merged_tokens += sum(part.tokens for part in parts)
        return super().credit(this, parts)


class Premature(Progress):
    """Ends with half of the tokens."""

    def allows(self, global_step: int, tokens: int) -> bool:
        return super().allows(global_step, 2 * tokens)


class Wavering(ScheduleClock):
    """Goes back when fewer tokens were merged than expected."""

    def at(self, global_step: int) -> int:
        return max(0, global_step + self._lead)


class Hasting(Learner):
    """Trains ahead of its schedule."""

    @property
    def schedule_step(self) -> int:
        return super().schedule_step + 1


class OfAnotherTable(Syncer):
    """Opens rounds by the table of the first phase to the end."""

    def __init__(self, config: ProtocolConfig, *args: Any, **others: Any) -> None:
        super().__init__(config, *args, **others)
        self.rounds.turns = replace(config, sync_later={}).turns


class Skips(RoundBook):
    """Has a round of nothing in every tenth step."""

    def _open(self, now_s: float) -> Round | None:
        opened = super()._open(now_s)
        if opened is not None and opened.global_step % 10 == 0:
            opened.fragment_id = -1
        return opened


class CopiesAhead(Stager):
    """Copies what is due later than the next rounds."""

    def stage_due(self, now: StepReport, first_round: int) -> None:
        super().stage_due(now, first_round + self.config.overlap_steps + 1)


def _forgotten(send: Send) -> bool:
    return send.peer == "island-3" and isinstance(send.message, GlobalFragment)
