"""Rounds at the syncer: quorum, grace, pulls, merges, and the pace of rounds (paper, Alg. 2).

A round is one global step's turn of its due fragment:

    COLLECTING --quorum and grace--> PULLING --all answered or gone--> MERGING --on_merged--> broadcast
         |  (no fragment due)            |  (nobody answered)             |  (no value was usable)
         +--> Advance                    +--> abandoned: Discard, Advance +--> abandoned: Advance

One round collects at a time. Up to overlap_steps rounds (tau) are in flight, never two of the same fragment. With fewer
live learners than the quorum (K) a round stays in COLLECTING ("below quorum"): merging pauses, training does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_jax.protocol.claims import contradiction
from diloco_jax.protocol.closing import (
    ENOUGH,
    GAMMA,
    SHORT_STEP_S,
    Facts,
    GraceWindow,
    closing,
    grace_window_s,
    least_wait_s,
)
from diloco_jax.protocol.effects import Contribution, Discard, Drop, Effects, Merge, SaveSnapshot, Send
from diloco_jax.protocol.leases import LeaseBooks
from diloco_jax.protocol.member import ACTIVE, JOINING, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import Advance, FragmentValue, PullRequest
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.evaluations import Evaluations
from diloco_jax.protocol.syncer.owed import ANSWER_STEPS, Owed, resting
from diloco_jax.protocol.syncer.progress import Downstream, Progress
from diloco_jax.protocol.syncer.round import MERGING, OVER, PULLING, Pace, Round
from diloco_jax.protocol.turns import Turns


@dataclass(slots=True)
class RoundBook:
    """The rounds in flight, the members that are fresh for the round that collects, and the pace."""

    effects: Effects
    config: ProtocolConfig
    progress: Progress
    membership: Membership
    # The versions that rounds make.
    downstream: Downstream
    # The data leases, which record what was merged.
    leases: LeaseBooks
    # The last evaluation follows the last round.
    evaluations: Evaluations
    turns: Turns
    # Global step -> round.
    flying: dict[int, Round] = field(default_factory=dict)
    # The round that is not closed yet.
    collecting: Round | None = None
    # Members that have reported a step which the collecting round may count.
    fresh: set[str] = field(default_factory=set)
    # Member -> the answers that it owes.
    owing: dict[str, Owed] = field(default_factory=dict)
    # While True no round opens or closes, because learners may bring newer versions.
    paused: bool = False
    pace: Pace = field(default_factory=Pace)
    # When the newest round of a fragment closed.
    closed_s: float = 0.0
    lockstep: bool = field(init=False)
    # The last global step of the first turn of the fragments.
    first_turn: int = field(init=False)

    def __post_init__(self) -> None:
        self.lockstep = self.config.lockstep
        self.first_turn = self.config.groups.gap_max

    def proceed(self, now_s: float) -> None:
        """Open and close the rounds that can be opened and closed now."""
        while not (self.progress.finished or self.paused):
            round_ = self.collecting or self._open(now_s)
            if round_ is None:
                break
            late = self._late(now_s)
            if self._reliable(late) < self.config.quorum:
                # A learner may have left since the quorum was met.
                round_.window = None
            elif round_.window is None:
                round_.window = self._window(round_, now_s)
            decision = closing(self._facts(round_, late, now_s), now_s)
            round_.closes_s = decision.at_s if round_.window is not None else None
            if now_s < decision.at_s:
                break
            self._close(round_, late, decision.reason, now_s)

    def _promised_tokens(self) -> int:
        """Return the merged tokens that there will be if every value is merged that a closed round has asked for."""
        tokens = self.progress.merged_tokens
        if not self.progress.budget.tokens:
            return tokens
        reported: dict[str, int] = {}
        # The oldest round comes first, so that each member's newest report stays.
        for round_ in self.flying.values():
            reported |= {name: round_.told_tokens[name] for name in {*round_.asked, *round_.values} - round_.former}
        members = self.membership.members
        most = self.progress.value_tokens_max
        return tokens + sum(min(most, max(0, reported[name] - members[name].credit.merged_tokens)) for name in reported)

    def _next_step(self) -> int:
        """Return the global step of the next round."""
        step = self.progress.global_step
        return self.turns.next_due(step) if self.lockstep else step + 1

    def may_open(self) -> bool:
        """Return whether the limits of the run allow another round."""
        return self.progress.allows(self._next_step(), self._promised_tokens())

    def _open(self, now_s: float) -> Round | None:
        """Open the next round, if its fragment and a place in flight are free; finish after the last round."""
        step = self._next_step()
        if not self.may_open():
            if not self.flying:
                self.progress.finished = True
                self.evaluations.conclude(now_s)
            return None
        fragment_id = self.turns.due(step)
        full = len(self.flying) >= max(1, self.config.overlap_steps)
        if full or any(round_.fragment_id == fragment_id >= 0 for round_ in self.flying.values()):
            for round_ in self._blocking(fragment_id, full, owed=False):
                round_.blocks_s = now_s if round_.blocks_s is None else round_.blocks_s
            for round_ in self._blocking(fragment_id, full, owed=True):
                self._give_up(round_, f"no value before round {round_.global_step} kept the next one waiting", now_s)
            return None
        for round_ in self.flying.values():
            round_.blocks_s = None
        self.collecting = self.flying[step] = Round(step, fragment_id, now_s)
        self.fresh = set()
        for member in self.membership.members.values():
            self.count(member)
        return self.collecting

    def count(self, member: Member) -> bool:
        """Count a live member towards the collecting round if its newest report is fresh; return whether it is new."""
        round_ = self.collecting
        if round_ is None or member.state != ACTIVE or member.learner_id in self.fresh:
            return False
        if not member.is_fresh(round_.global_step, round_.fragment_id, self.lockstep):
            return False
        self.fresh.add(member.learner_id)
        return True

    def _window(self, round_: Round, now_s: float) -> GraceWindow:
        """Return the moments that limit a round which meets its quorum now."""
        step_s = self.membership.median_step_s()
        broadcast_s, wait_s = self.membership.broadcast_s(step_s)
        self.pace = self.pace.after_quorum(now_s - round_.opened_s, step_s, self.config)
        # If rounds closed faster than the links carry their versions, versions would queue up.
        links_s = self.closed_s + broadcast_s / GAMMA + wait_s if round_.fragment_id >= 0 else now_s
        sync_s = (self.pace.merge_s or 0.0) + broadcast_s
        grace_s = grace_window_s(self.config, step_s, self.pace.quorum_s, sync_s)
        return GraceWindow(now_s, max(now_s, links_s), now_s + grace_s, now_s + least_wait_s(self.config, step_s))

    def _facts(self, round_: Round, late: set[str], now_s: float) -> Facts:
        """Return what decides when a round closes."""
        window, fresh = round_.window, len(self.fresh - late)
        # The least wait only matters after the grace window.
        waits = window is not None and window.grace_s <= now_s and window.grace_s < window.least_s
        few = window is not None and waits and self._few(window, late, now_s)
        return Facts(
            self.config.quorum,
            self.membership.live - len(late),
            fresh,
            self._reliable(late),
            window,
            few,
            self._starting(round_),
        )

    def _reliable(self, late: set[str]) -> int:
        """Return how many reports count towards the quorum."""
        return len(self.fresh - late - self._unreliable()) if self.owing else len(self.fresh - late)

    def _few(self, window: GraceWindow, late: set[str], now_s: float) -> bool:
        """Return whether a learner that keeps pace is missing, and too few of them reported in the grace window."""
        paced = [m for m in self.membership.keeping_pace(now_s) if m.learner_id not in late]
        reported = [m for m in paced if m.learner_id in self.fresh]
        timely = sum(m.reported_s <= window.grace_s for m in reported)
        return len(reported) < len(paced) and timely < (1.0 if self.lockstep else ENOUGH) * len(paced)

    def _starting(self, round_: Round) -> bool:
        """Return whether, in the first turn of the fragments, a joined learner has not made a step yet.

        Without this wait, rounds of a few milliseconds would use up much of a short run while that learner compiles.
        """
        if round_.global_step > self.first_turn or not self.config.grace_steps_max:
            return False
        if (self.membership.median_step_s() or 0.0) >= SHORT_STEP_S:
            return False
        return any(m.state == JOINING and m.total_steps == 0 for m in self.membership.members.values())

    @property
    def awaits_starters(self) -> bool:
        """True while the collecting round waits for learners that have not made their first step."""
        round_ = self.collecting
        return round_ is not None and round_.window is not None and self._starting(round_)

    def _unreliable(self) -> set[str]:
        """Return the members that owe answers, if the others can meet the quorum; rounds need the others."""
        if not self.owing:
            return set()
        members = self.membership.members
        owing = {name for name in self.owing if members[name].state == ACTIVE}
        return owing if self.membership.live - len(owing) >= self.config.quorum else set()

    def _late(self, now_s: float) -> set[str]:
        """Return the live learners that the collecting round excludes, because earlier rounds waited long for them.

        On a slow link the collecting round would wait as long, and so would every round after it. A learner that owes
        answers is asked in some rounds only (owed.py). If too few learners would remain, the round excludes only those
        that owe, and if that is too many, none.
        """
        members = self.membership.members
        rest: set[str] = set()
        if self.owing and self.collecting is not None:
            asleep = resting(self.owing, self.collecting.global_step)
            rest = {name for name in asleep if members[name].state == ACTIVE}
        slow: set[str] = set()
        # With fewer rounds in flight there is only the collecting one.
        if len(self.flying) >= 2:
            for round_ in self.flying.values():
                if round_.asked and round_.waits_long(now_s):
                    slow.update(name for name in round_.asked if members[name].state == ACTIVE)
        enough = self.membership.live - self.config.quorum
        late = rest | slow
        if len(late) > enough:
            late = rest
        return late if len(late) <= enough else set()

    def _close(self, round_: Round, late: set[str], reason: str, now_s: float) -> None:
        progress, members = self.progress, sorted(self.fresh - late)
        snapshot = self.config.snapshot_due(progress.global_step, round_.global_step)
        self.collecting = None
        progress.global_step = round_.global_step
        for learner_id in members:
            member = self.membership.members[learner_id]
            member.credit.used_step = member.local_step
        self.effects.append(progress.note("closed", round_.fragment_id, tuple(members), reason + _without(late)))
        if snapshot:
            self.effects.append(SaveSnapshot(progress.global_step))
        if round_.fragment_id < 0:
            del self.flying[round_.global_step]
            self._advance()
            return
        round_.phase = PULLING
        round_.closed_s = self.closed_s = now_s
        round_.resend_wait_s = self._resend_wait_s()
        round_.resend_s = now_s + round_.resend_wait_s
        round_.expires_s = now_s + self.config.pull_timeout_s
        for learner_id in members:
            round_.size += 1
            member = self.membership.members[learner_id]
            round_.asked[learner_id] = local_step = member.local_step
            round_.told_tokens[learner_id] = member.tokens
            member.asked_for(round_.fragment_id, round_.global_step)
            self.effects.append(Send(learner_id, PullRequest(round_.global_step, round_.fragment_id, local_step)))
        self._expect_answers(round_)
        for member in self.membership.live_members():
            self.downstream.repair(member, round_.fragment_id)

    @property
    def any_closed(self) -> bool:
        """True while values of a round are in transit, or are being merged."""
        return len(self.flying) > (self.collecting is not None)

    def on_value(self, member: Member, message: FragmentValue, now_s: float) -> None:
        """Take a member's answer to a pull, if it is usable."""
        name, fragment_id, history = member.learner_id, message.fragment_id, self.downstream.history
        if not 0 <= fragment_id < len(history):
            self._drop(name, f"value of fragment {fragment_id}, there are {len(history)}")
            return
        round_ = self.flying.get(message.global_step)
        if round_ is None or round_.phase != PULLING or name not in round_.asked:
            self._drop(name, f"value for round {message.global_step} came late or was not asked for")
            return
        if fragment_id != round_.fragment_id:
            self._drop(name, f"value of fragment {fragment_id} where {round_.fragment_id} was asked for")
            return
        if name in round_.early:
            self._drop(name, f"value for round {message.global_step} came twice")
            return
        if message.local_step > member.local_step:
            # Bulk connections may overtake the control connection. The value counts once the report of its step is
            # here, because only reports confirm its counters.
            round_.early[name] = message
            return
        self._take(round_, member, message, now_s)

    def on_reported(self, member: Member, now_s: float) -> None:
        """Take the values of a member that came before the report of their step."""
        for round_ in list(self.flying.values()):
            early = round_.early.get(member.learner_id)
            if early is not None and early.local_step <= member.local_step:
                self._take(round_, member, early, now_s)

    def _take(self, round_: Round, member: Member, message: FragmentValue, now_s: float) -> None:
        """Take a member's answer, whose step its reports have confirmed."""
        name, fragment_id, history = member.learner_id, message.fragment_id, self.downstream.history
        # The driver keeps the payload of a value that came before its report.
        kept = round_.global_step if name in round_.early else -1
        round_.answered(name, now_s)
        base = message.base_version
        if base in history[fragment_id] and not self._held_up(round_, member, now_s):
            self.owing.pop(name, None)
        else:
            self._owe(name, round_)
        self._expect_answers(round_)
        asked = member.credit.asked.get(fragment_id)
        # A state written by an older release does not hold the report that was newest when the round asked.
        known = asked is not None and asked.round == round_.global_step
        if message.steps < 1 or message.tokens < 1:
            self._drop(name, "value without a step since the last adoption", kept)
        elif base not in history[fragment_id]:
            self._drop(name, f"value against version {base}, kept are {history[fragment_id]}", kept)
            self.downstream.send(member, fragment_id)
        elif asked and known and (wrong := contradiction(message, asked, member.reported(fragment_id))):
            self._drop(name, wrong, kept)
        else:
            member.credit.merged_base[fragment_id] = base
            tokens = self.progress.plausible(message.tokens, message.steps, member, self.membership)
            data = (message.samples, message.since, member.corpus)
            round_.values[name] = Contribution(name, message.local_step, message.steps, tokens, base, *data)
            self.settle(round_, now_s)
            # The collecting round may have excluded this learner because its value was late.
            self.proceed(now_s)
            return
        self.settle(round_, now_s)

    def _drop(self, name: str, reason: str, kept: int = -1) -> None:
        self.effects.append(Drop(name, reason, kept))

    def settle(self, round_: Round, now_s: float) -> None:
        """Merge a pulled round after the last answer; give it up if no learner answered."""
        if round_.asked or round_.phase != PULLING:
            return
        if round_.values:
            round_.phase, round_.pulled_s = MERGING, now_s
            contributions = [round_.values[learner_id] for learner_id in sorted(round_.values)]
            weighed = self.progress.weighed(contributions, self.membership)
            self.effects.append(Merge(round_.global_step, round_.fragment_id, weighed))
            return
        del self.flying[round_.global_step]
        # `proceed` may give up other rounds, and those that the caller is about to give up are among them.
        round_.phase = OVER
        note = self.progress.note("abandoned", round_.fragment_id, (), "no value arrived", round_.global_step)
        self.effects.extend([note, Discard(round_.global_step)])
        self._advance()
        self.proceed(now_s)

    def merging(self, global_step: int) -> Round:
        """Return the round whose merge is done."""
        round_ = self.flying[global_step]
        assert round_.phase == MERGING, f"round {global_step} merged in phase {round_.phase}"
        return round_

    def end_merge(self, round_: Round) -> None:
        """Remove a merged round from the book."""
        del self.flying[round_.global_step]

    def abandon(self, round_: Round) -> None:
        """Give up a round whose values were all unusable."""
        note = self.progress.note("abandoned", round_.fragment_id, (), "no value was usable", round_.global_step)
        self.effects.append(note)
        self._advance()

    def renew(self, round_: Round, contributions: Sequence[Contribution], digest: int, now_s: float) -> None:
        """Broadcast the new version that a round has made."""
        self.pace = self.pace.after_merge(now_s - round_.closed_s, self.membership.median_step_s(), self.config)
        self.downstream.renew(round_.fragment_id, round_.global_step, digest)
        for member in self.credit(round_, contributions):
            member.credit.merged_round[round_.fragment_id] = round_.global_step
        for member in self.membership.connected():
            self.downstream.send(member, round_.fragment_id, broadcast_s=now_s)

    def credit(self, round_: Round, contributions: Sequence[Contribution]) -> list[Member]:
        """Count the values in a new version; return the members whose present incarnation made one of them."""
        fragment_id, version, progress = round_.fragment_id, round_.global_step, self.progress
        present: list[Member] = []
        progress.merged_rounds += 1
        progress.merged_parts += len(contributions)
        progress.merged_step = max(progress.merged_step, version)
        for contribution in contributions:
            member = self.membership.members[contribution.learner_id]
            member.rounds += 1
            if contribution.learner_id in round_.former:
                # The counters and the data of the present incarnation are new.
                continue
            credit = member.credit
            tokens = (
                min(contribution.tokens, progress.value_tokens_max) if progress.budget.tokens else contribution.tokens
            )
            progress.merged_tokens += credit.merge(round_.told_tokens[contribution.learner_id], tokens)
            credit.merged_mark, credit.strikes, credit.alarmed = progress.merged_rounds, 0, False
            if (leases := self.leases.books.get(member.corpus)) is not None:
                leases.on_merged(
                    contribution.learner_id, fragment_id, version, contribution.samples, contribution.since
                )
            present.append(member)
        self.leases.on_version(fragment_id, version)
        names = tuple([contribution.learner_id for contribution in contributions])
        self.effects.append(progress.note("merged", fragment_id, names, "", version))
        return present

    def lose(self, learner_id: str, now_s: float) -> None:
        """Remove a lost learner from the rounds: its report, its early value, and the answers that it owes."""
        self.fresh.discard(learner_id)
        for round_ in list(self.flying.values()):
            if round_.early.pop(learner_id, None) is not None:
                self._drop(learner_id, "its connection ended before the report of its value", round_.global_step)
            if round_.asked.pop(learner_id, None) is not None:
                self.settle(round_, now_s)

    def withdraw(self, member: Member) -> None:
        """Remove a banned learner's values from the rounds that have not started to merge; its steps were not used."""
        for round_ in self.flying.values():
            if round_.phase == PULLING and round_.values.pop(member.learner_id, None) is not None:
                round_.former.discard(member.learner_id)
                member.credit.merged_base.pop(round_.fragment_id, None)
                self._drop(member.learner_id, "it was banned before the merge of its value", round_.global_step)

    def clear(self) -> None:
        """Give up every round in flight."""
        self.effects.extend([Discard(round_.global_step) for round_ in self.flying.values()])
        self.flying, self.collecting, self.fresh = {}, None, set()

    def _advance(self) -> None:
        message = Advance(self.progress.global_step, self.progress.schedule_lead)
        self.effects.extend([Send(member.learner_id, message) for member in self.membership.connected()])

    def on_tick(self, now_s: float) -> None:
        """Repeat pulls without an answer, and finally give them up."""
        for round_ in [r for r in self.flying.values() if r.phase == PULLING]:
            round_.owed = now_s >= round_.owed_s
            if now_s >= round_.expires_s:
                self._give_up(round_, f"no value within {self.config.pull_timeout_s} s", now_s)
            elif now_s >= round_.resend_s:
                round_.resend_wait_s *= 2
                round_.resend_s = now_s + round_.resend_wait_s
                for learner_id, local_step in sorted(round_.asked.items()):
                    self.effects.append(
                        Send(learner_id, PullRequest(round_.global_step, round_.fragment_id, local_step))
                    )

    def _expect_answers(self, round_: Round) -> None:
        """Set when the answers that a round waits for are owed."""
        members, resend_s, longest_s = self.membership.members, self._resend_wait_s(), 0.0
        # Each answer leads here, so the maximum over the learners that are asked is written out for speed.
        for name in round_.asked:
            member = members[name]
            step_s = member.step_s or self.membership.median_step_s() or 0.0
            # A learner may do something else between two steps, such as to wait for its data.
            between_s = member.between_s if member.between_s < resend_s else resend_s
            busy_s = step_s if step_s > between_s else between_s
            longest_s = busy_s if busy_s > longest_s else longest_s
        answer_s = (ANSWER_STEPS + self.config.wait_steps) * longest_s
        if not round_.asked.keys() <= self.owing.keys():
            answer_s = max(answer_s, resend_s)
        round_.owed_s, round_.owed = round_.closed_s + answer_s, False

    def _resend_wait_s(self) -> float:
        """Return the seconds until a pull without an answer is repeated for the first time."""
        return max(self.config.resend_s, 2.0 * (self.pace.merge_s or 0.0))

    def _blocking(self, fragment_id: int, full: bool, *, owed: bool) -> list[Round]:
        """Return the rounds whose wait for answers, or for owed ones, keeps the next round from opening.

        They do if its fragment is in one of them, or if no round in flight does anything else. In lockstep all learners
        wait for each other, whatever it takes.
        """
        if self.lockstep:
            return []
        others, rounds = bool(self._unreliable()), [r for r in self.flying.values() if r.phase == PULLING]
        waiting = [round_ for round_ in rounds if (round_.owed or not owed) and (others or round_.values)]
        if full and len(waiting) == len(self.flying):
            return waiting
        return [round_ for round_ in waiting if round_.fragment_id == fragment_id]

    def _give_up(self, round_: Round, reason: str, now_s: float) -> None:
        """End a round's wait for values; their learners owe them."""
        for name in sorted(round_.asked):
            self._drop(name, reason, round_.global_step)
            self._owe(name, round_)
        round_.asked.clear()
        round_.early.clear()
        self.settle(round_, now_s)

    def _owe(self, name: str, round_: Round) -> None:
        before = self.owing.get(name)
        self.owing[name] = before.after(round_.global_step) if before else Owed(1, round_.global_step)

    def _held_up(self, round_: Round, member: Member, now_s: float) -> bool:
        """Return whether a round has kept the next one from opening for longer than this member's answers take."""
        if round_.blocks_s is None:
            return False
        step_s = max(member.step_s or 0.0, self.membership.median_step_s() or 0.0)
        return now_s - round_.blocks_s > (ANSWER_STEPS + self.config.wait_steps) * step_s

    def waiting_for(self, now_s: float) -> str:
        """Describe what the next round waits for."""
        round_ = self.collecting
        if round_ is None:
            oldest = min(self.flying.values(), key=lambda r: r.global_step, default=None)
            return oldest.waits_for if oldest is not None else "the first learner"
        connected = self.membership.connected()
        late = self._late(now_s)
        missing = [m.learner_id for m in connected if m.state == ACTIVE and m.learner_id not in self.fresh | late]
        joining = [m.learner_id for m in connected if m.state == JOINING]
        words = [
            f"round {round_.global_step}: {closing(self._facts(round_, late, now_s), now_s).reason}{_without(late)}"
        ]
        words += [f"not yet: {', '.join(missing)}"] if missing else []
        words += [f"joining: {', '.join(joining)}"] if joining else []
        return "; ".join(words)

    def state(self) -> dict[str, Any]:
        return {
            "rounds": [round_.to_plain() for round_ in self.flying.values()],
            "collecting": self.collecting.global_step if self.collecting is not None else None,
            "fresh": sorted(self.fresh),
            "pace": [*self.pace, self.closed_s],
            "owing": [[name, *owed] for name, owed in self.owing.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.flying = {round_.global_step: round_ for round_ in map(Round.from_plain, state["rounds"])}
        self.collecting = self.flying.get(state["collecting"])
        self.fresh = set(state["fresh"])
        # Older releases wrote two more averages between these.
        self.pace, self.closed_s = Pace(*state["pace"][:2]), state["pace"][-1]
        # Older releases wrote none.
        self.owing = {name: Owed(*owed) for name, *owed in state.get("owing", ())}


def _without(late: set[str]) -> str:
    """Return the text about the live learners that a round excludes."""
    return f", without {', '.join(sorted(late))}, which an earlier round still waits for" if late else ""
