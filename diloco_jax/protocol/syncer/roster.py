"""Members as the syncer deals with them: heard, silent, lost, kept in data, watched and expelled."""

from dataclasses import dataclass

from diloco_jax.protocol.effects import Effect, Send
from diloco_jax.protocol.leases import LeaseBook
from diloco_jax.protocol.member import ACTIVE, GONE, JOINING, SILENT, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import Expel, Hello, Lease, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.recovery import Matchmaker
from diloco_jax.protocol.syncer.book import RoundBook
from diloco_jax.protocol.syncer.comeback import Comeback
from diloco_jax.protocol.syncer.progress import Progress
from diloco_jax.protocol.syncer.rounds import Round


@dataclass(slots=True)
class Roster:
    """The members, and all that must hear of it when one of them comes or goes."""

    config: ProtocolConfig
    progress: Progress
    membership: Membership
    leases: LeaseBook
    matches: Matchmaker
    rounds: RoundBook  # which wait for members
    comeback: Comeback  # which waits for them too
    check_s: float = 0.0  # when to look next for those that have fallen silent

    def replace(self, known: Member, effects: list[Effect], now_s: float) -> None:
        """A newer incarnation greets: what the old one gave to rounds that have not ended is of an earlier life."""
        name, restoring = known.learner_id, self.comeback.restoring
        if known.state != GONE:
            effects += self.lose(known, GONE, "replaced by a newer incarnation", now_s)
        self.release(known, effects)
        uncertain = restoring.uncertain.values() if restoring is not None else ()
        for this in [*self.rounds.flying.values(), *uncertain]:
            if name in this.values:
                this.former.add(name)
        self.leases.forget(name)

    def check_silence(self, effects: list[Effect], now_s: float) -> None:
        for member in self.membership.expired(self.config.lease_s, now_s):
            effects += self.lose(member, SILENT, f"not heard for {self.config.lease_s} s", now_s)
        if not self.progress.finished:
            for name in sorted(self.leases.holdings):
                member = self.membership.members[name]
                if member.state in (GONE, SILENT) and now_s - member.since_s >= self.config.release_s:
                    self.release(member, effects)

    def heard(self, member: Member, effects: list[Effect], now_s: float) -> None:
        """A sign of life. A member counts as live once its report holds every fragment."""
        member.heard_s = now_s
        if member.state == ACTIVE:
            return
        if member.state == SILENT:
            effects.append(self.progress.note("back", -1, (member.learner_id,), "heard again"))
            self.membership.set_state(member, JOINING, now_s)
            self.comeback.on_back(member.learner_id, effects, now_s)
        if member.holds_all:
            member.credit.merged_mark = self.progress.merged_rounds
            self.membership.set_state(member, ACTIVE, now_s)
            effects += self.matches.on_done(member.learner_id)  # in case that its own word for it was lost

    def supply(self, member: Member, message: Hello | StepReport, effects: list[Effect]) -> None:
        """Keep a learner in data: lease what it uses up, repeat what it lost."""
        name, ahead = member.learner_id, self.config.lease_ahead_steps * member.step_samples
        holding = self.leases.holdings.get(name)
        if holding is not None and message.granted > holding.granted:
            self.release(member, effects)  # leased to it in a time that nobody remembers
            self.leases.forget(name)
            holding = None
        if holding is None:  # new, or away for so long that its data went to others
            holding = self.leases.open(name, message.granted)
        leases: list[Lease] = []
        used, repeats = holding.settled, True
        if isinstance(message, StepReport):  # a greeting does not tell what is used up; the next report will
            used = message.samples if message.samples > used else used
            repeats = member.local_step > member.lease_step + 1
        if repeats and message.granted < holding.granted:
            leases = holding.after(message.granted)
        unused = holding.granted - used
        if 2 * unused <= ahead and not self.progress.finished:
            steps = -(-(ahead - unused) // member.step_samples)
            leases = leases + self.leases.grant(name, steps * member.step_samples)
        if leases:
            member.lease_step = member.local_step
            effects += [Send(name, lease) for lease in leases]

    def lose(self, member: Member, state: str, reason: str, now_s: float) -> list[Effect]:
        """Take a member out of everything that waits for it."""
        name = member.learner_id
        self.membership.set_state(member, state, now_s)
        effects: list[Effect] = [self.progress.note("silent" if state == SILENT else "left", -1, (name,), reason)]
        if state == GONE:
            effects += self.matches.on_lost(name, f"it is gone: {reason}")
        self.comeback.on_lost(name)
        if state == GONE or not self.progress.finished:  # at the end there is nobody else to ask
            self.rounds.evaluations.lose(name, reason, effects, now_s)
        return effects + self.rounds.lose(name, now_s)

    def release(self, member: Member, effects: list[Effect]) -> None:
        """Let others have the data that a lost incarnation did not finish; it will not ask for a state any more."""
        effects += self.matches.on_done(member.learner_id)
        count = self.leases.release(member.learner_id)
        if count:
            effects.append(self.progress.note("released", -1, (member.learner_id,), f"{count} samples go to others"))

    def strike(self, member: Member, this: Round, effects: list[Effect], now_s: float) -> None:
        """A value that would have harmed the model: count it, and part with a learner that goes on like that."""
        if member.state == GONE:
            return
        member.credit.strikes += 1
        name, note = member.learner_id, self.progress.note
        strikes, most = member.credit.strikes, self.config.strikes_max
        reason = f"value of round {this.global_step} is not usable, strike {strikes} of {most}"
        effects.append(note("strike", this.fragment_id, (name,), reason, this.global_step))
        if strikes < most:
            return
        member.credit.expelled = True
        reason = f"{most} values in a row were NaN, infinite, wildly large or unreadable"
        effects += [Send(name, Expel(reason)), note("expelled", -1, (name,), reason)]
        effects += self.lose(member, GONE, "expelled", now_s)
        self.release(member, effects)

    def watch_shares(self, effects: list[Effect]) -> None:
        """Raise an alarm, once, for a live learner whose work never arrives in the model."""
        for member in self.membership.live_members():
            rounds = self.progress.merged_rounds - member.credit.merged_mark
            if rounds >= self.config.unmerged_rounds_max and not member.credit.alarmed:
                member.credit.alarmed = True
                reason = f"alive, but without a share in the last {rounds} merged rounds"
                effects.append(self.progress.note("unmerged", -1, (member.learner_id,), reason))
