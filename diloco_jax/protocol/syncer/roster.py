"""Treatment of members by the syncer: signs of life, silence, loss, data leases, strikes, expulsion and bans."""

from dataclasses import dataclass

from diloco_jax.protocol.effects import Effects, Send
from diloco_jax.protocol.leases import LeaseBooks
from diloco_jax.protocol.member import ACTIVE, DISCONNECTED, JOINING, SILENT, Member
from diloco_jax.protocol.membership import Membership, wrong_name
from diloco_jax.protocol.messages import ON_PURPOSE, Expel, Hello, Lease, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.book import RoundBook
from diloco_jax.protocol.syncer.comeback import Comeback
from diloco_jax.protocol.syncer.matchmaker import Matchmaker
from diloco_jax.protocol.syncer.progress import Progress
from diloco_jax.protocol.syncer.round import Round


@dataclass(slots=True)
class Roster:
    """The members, and all parts of the machine that must know when a member joins or is lost."""

    effects: Effects
    config: ProtocolConfig
    progress: Progress
    membership: Membership
    leases: LeaseBooks
    matches: Matchmaker
    rounds: RoundBook
    comeback: Comeback
    # When to look next for members that have fallen silent.
    check_s: float = 0.0

    def replace(self, known: Member, now_s: float) -> None:
        """Retire an incarnation whose successor greets.

        The values that it gave to rounds in flight count as values of a former incarnation.
        """
        name, restoring = known.learner_id, self.comeback.restoring
        if known.state != DISCONNECTED:
            self.lose(known, DISCONNECTED, "replaced by a newer incarnation", now_s)
        self.release(known)
        uncertain = restoring.uncertain.values() if restoring is not None else ()
        for this in [*self.rounds.flying.values(), *uncertain]:
            if name in this.values:
                this.former.add(name)
        self.rounds.owing.pop(name, None)
        self.leases.forget(known.corpus, name)

    def check_silence(self, now_s: float) -> None:
        """Find members that have fallen silent, and give the data of those lost for long to others."""
        for member in self.membership.expired(self.config.silence_s, now_s):
            self.lose(member, SILENT, f"not heard for {self.config.silence_s} s", now_s)
        if not self.progress.finished:
            for name in self.leases.holders:
                member = self.membership.members[name]
                if member.state in (DISCONNECTED, SILENT) and now_s - member.since_s >= self.config.release_s:
                    self.release(member)

    def heard(self, member: Member, now_s: float) -> None:
        """Record a sign of life. A member counts as live once its report holds every fragment."""
        member.heard_s = now_s
        if member.state == ACTIVE:
            return
        if member.state == SILENT:
            self._note("back", member, "heard again")
            self.membership.set_state(member, JOINING, now_s)
            self.comeback.on_back(member.learner_id, now_s)
        if member.holds_all:
            member.credit.merged_mark = self.progress.merged_rounds
            self.membership.set_state(member, ACTIVE, now_s)
            # The member's own StateDone may have been lost.
            self.matches.on_done(member.learner_id)

    def supply(self, member: Member, message: Hello | StepReport) -> None:
        """Keep a learner in data: lease as much as it uses up, and repeat the leases that it lost."""
        if not member.step_samples:
            # It reads its own data.
            return
        name, ahead = member.learner_id, self.config.lease_ahead_steps * member.step_samples
        book = self.leases.of(member.corpus)
        holding = book.holdings.get(name)
        if holding is not None and message.granted > holding.granted:
            # An epoch of the syncer whose records are lost granted these leases.
            self.release(member)
            book.forget(name)
            holding = None
        if holding is None:
            # The learner is new, or was lost for so long that its data went to others.
            holding = book.open(name, message.granted)
        leases: list[Lease] = []
        used, repeats = holding.settled, True
        if isinstance(message, StepReport):
            # Only a report names what is used up; after a greeting the next report does.
            used = message.samples if message.samples > used else used
            repeats = member.local_step > member.lease_step + 1
        if repeats and message.granted < holding.granted:
            leases = holding.after(message.granted)
        unused = holding.granted - used
        if 2 * unused <= ahead and not self.progress.finished:
            steps = -(-(ahead - unused) // member.step_samples)
            leases = leases + book.grant(name, steps * member.step_samples)
        if leases:
            member.lease_step = member.local_step
            self.effects.extend([Send(name, lease) for lease in leases])

    def lose(self, member: Member, state: str, reason: str, now_s: float) -> None:
        """Take a member out of everything that waits for it."""
        name = member.learner_id
        self.membership.set_state(member, state, now_s)
        left = "left" if reason in ON_PURPOSE else "disconnected"
        self._note("silent" if state == SILENT else left, member, reason)
        if state == DISCONNECTED:
            self.matches.on_lost(name, f"it is disconnected: {reason}")
        self.comeback.on_lost(name)
        # At the end of a run a silent learner keeps the request to evaluate the final model: all others got Stop.
        if state == DISCONNECTED or not self.progress.finished:
            self.rounds.evaluations.lose(name, reason, now_s)
        self.rounds.lose(name, now_s)

    def release(self, member: Member) -> None:
        """Give the data that a lost incarnation did not finish to others; it requests no state any more."""
        self.matches.on_done(member.learner_id)
        count = self.leases.release(member.corpus, member.learner_id)
        if count:
            others = f"islands that read {member.corpus}" if member.corpus else "others"
            self._note("released", member, f"its {count} leased samples go to {others}")

    def strike(self, member: Member, this: Round, now_s: float) -> None:
        """Count an unusable value, and expel a learner whose last values were all unusable."""
        if member.state == DISCONNECTED:
            return
        member.credit.strikes += 1
        name, note = member.learner_id, self.progress.note
        strikes, most = member.credit.strikes, self.config.strikes_max
        reason = f"value of round {this.global_step} is not usable, strike {strikes} of {most}"
        self.effects.append(note("strike", this.fragment_id, (name,), reason, this.global_step))
        if strikes < most:
            return
        member.credit.expelled = True
        reason = f"{most} values in a row were NaN, infinite, wildly large or unreadable"
        self.effects.append(Send(name, Expel(reason)))
        self._note("expelled", member, reason)
        self.lose(member, DISCONNECTED, "expelled", now_s)
        self.release(member)

    def ban(self, learner_id: str, why: str, now_s: float) -> None:
        """Exclude a learner of this name from the run, whether it is connected, disconnected or unknown.

        A merge that has started keeps the learner's value, because the driver computes it already. No later merge gets
        one.

        Raises:
            ValueError: the ban is not possible, and nothing has changed; the message has the reason.
        """
        member = self.membership.members.get(learner_id)
        self._check_ban(learner_id, why)
        self.membership.bans.add(learner_id, why)
        self.effects.append(self.progress.note("banned", -1, (learner_id,), why))
        if member is None:
            return
        self.rounds.withdraw(member)
        if member.state != DISCONNECTED:
            self.effects.append(Send(learner_id, Expel(self.membership.bans.refusal(learner_id))))
            self.lose(member, DISCONNECTED, "banned", now_s)
        self.comeback.forget(learner_id)
        self.release(member)

    def _check_ban(self, learner_id: str, why: str) -> None:
        if wrong := wrong_name(learner_id):
            raise ValueError(wrong)
        self.membership.bans.check_new(learner_id, why)
        if self.progress.finished:
            raise ValueError(f"the run is complete, so {learner_id} cannot be banned; its learners stop by themselves")
        if [member.learner_id for member in self.membership.live_members()] == [learner_id]:
            raise ValueError(
                f"{learner_id} is the only live learner, so its ban would end the training; stop the run instead, with "
                "Ctrl-C or SIGTERM to its syncer"
            )

    def admit(self, learner_id: str) -> None:
        """Lift the ban of a name; ValueError if there is none."""
        self.membership.bans.lift(learner_id)
        self.effects.append(self.progress.note("admitted", -1, (learner_id,), "its ban is lifted, it may join again"))

    def release_banned(self) -> None:
        """Give the data of banned learners to others, after a rewind to a time when they were members."""
        if self.progress.finished:
            return
        for learner_id, _ in self.membership.bans:
            if (member := self.membership.members.get(learner_id)) is not None:
                self.release(member)

    def watch_shares(self) -> None:
        """Note, once, each live learner that no round has merged for a long time."""
        for member in self.membership.live_members():
            rounds = self.progress.merged_rounds - member.credit.merged_mark
            if rounds >= self.config.unmerged_rounds_max and not member.credit.alarmed:
                member.credit.alarmed = True
                self._note("unmerged", member, f"alive, but without a share in the last {rounds} merged rounds")

    def _note(self, kind: str, member: Member, reason: str) -> None:
        self.effects.append(self.progress.note(kind, -1, (member.learner_id,), reason))
