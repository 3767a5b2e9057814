"""Checkers of rounds and merges."""

import re
from collections import defaultdict

from diloco_jax.protocol.effects import Adopt, Discard, Drop, Effect, Merge, Note, Send
from diloco_jax.protocol.messages import (
    Expel,
    FragmentValue,
    GlobalFragment,
    LearnerMessage,
    Refuse,
    StepReport,
    SyncerMessage,
    Welcome,
)
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch.sample_book import Incarnation
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess


class VersionsGrow(Checker):
    """Each incarnation adopts growing versions of a fragment, and some process of the syncer has made each of them."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Newest (process of the syncer, version) that was adopted.
        self._held: dict[tuple[str, int, int], tuple[int, int]] = {}
        # Lineage, fragment and version of everything that was made.
        self._made = {(0, fragment_id, 0) for fragment_id in range(self.config.num_fragments)}

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        values = self.values
        self._made |= {(self.lineage, fragment_id, version) for fragment_id, (version, _) in enumerate(values)}

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Merge):
                self._made.add((self.lineage, effect.fragment_id, effect.global_step))

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        for effect in effects:
            if isinstance(effect, Adopt):
                same = isinstance(message, GlobalFragment) and (message.fragment_id, message.version) == effect
                self.check(same, f"{process.name} adopts {effect}, but {message} arrived")
                assert isinstance(message, GlobalFragment)
                self._adopt(process, message)

    def _adopt(self, process: LearnerProcess, message: GlobalFragment) -> None:
        name, fragment_id, version = process.name, message.fragment_id, message.version
        held = self._held.get((*process.key, fragment_id), (0, -1))
        newer = (message.epoch, version) > held
        self.check(newer, f"{name} adopts version {version} of {fragment_id} of epoch {message.epoch}, held {held}")
        made = (self.lineages.get(message.epoch, -1), fragment_id, version) in self._made
        self.check(made, f"{name} adopts version {version} of {fragment_id}, which nobody made")
        self._held[(*process.key, fragment_id)] = (message.epoch, version)


class MergedOnce(Checker):
    """A value is merged at most once, for the round that asked for it, with at least one step; no payload leaks.

    That holds over all epochs of the syncer: none merges a round again, but one that the run went back from.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Payloads as a driver holds them.
        self._payloads: dict[int, dict[str, FragmentValue]] = defaultdict(dict)
        self._merged: set[tuple[str, int, int, int]] = set()
        # Round and learner -> the value that is being merged.
        self._merging: dict[tuple[int, str], tuple[str, int, int, int]] = {}
        # Lineage and number of each merged round.
        self._rounds: set[tuple[int, int]] = set()

    def on_syncer_died(self, machine: Syncer, now_s: float) -> None:
        self._payloads.clear()

    def on_merged(self, global_step: int, excluded: tuple[str, ...], now_s: float) -> None:
        # The merge excluded these values.
        for name in excluded:
            self._merged.discard(self._merging.get((global_step, name), ("", 0, 0, 0)))

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if isinstance(message, FragmentValue) and not _dropped(message, effects):
            held = self._payloads[message.global_step]
            self.check(message.learner_id not in held, f"a second payload is kept for {message}")
            held[message.learner_id] = message
        for effect in effects:
            if isinstance(effect, Merge):
                self._merge(effect)
            elif isinstance(effect, Drop) and effect.global_step >= 0:
                self._payloads[effect.global_step].pop(effect.peer, None)
            elif isinstance(effect, Discard):
                self._payloads.pop(effect.global_step, None)

    def _merge(self, merge: Merge) -> None:
        this = (self.lineage, merge.global_step)
        self.check(this not in self._rounds, f"round {merge.global_step} is merged twice")
        self._rounds.add(this)
        held = self._payloads.pop(merge.global_step, {})
        names = [each.learner_id for each in merge.contributions]
        self.check(names == sorted(held), f"{merge} merges {names}, payloads are held of {sorted(held)}")
        for part in merge.contributions:
            value = held[part.learner_id]
            self.check(part.steps >= 1 and part.tokens >= 1, f"{part} has no step in round {merge.global_step}")
            if part.learner_id in self.hostile:
                # hostile.py has the rule for hostile learners.
                continue
            # The limit on tokens is a multiple of the learners' median. A hostile learner may be the median of two.
            outvoted = not self.hostile or len(self.cluster.syncer.membership.live_members()) > 2
            tokens = value.tokens if outvoted else min(value.tokens, part.tokens)
            self.check(
                (part.local_step, part.steps, part.tokens, part.base_version, part.samples)
                == (value.local_step, value.steps, tokens, value.base_version, value.samples),
                f"{part} is not what arrived: {value}",
            )
            key = (value.learner_id, value.incarnation, value.fragment_id, value.local_step)
            self.check(value.fragment_id == merge.fragment_id and key not in self._merged, f"{value} is merged twice")
            self._merged.add(key)
            self._merging[merge.global_step, part.learner_id] = key

    def end(self) -> None:
        if self.cluster.syncer.finished:
            self.check(not any(self._payloads.values()), f"payloads were never freed: {dict(self._payloads)}")


class SharesAreTold(Checker):
    """A learner that adopts a version gets to know whether its own value is merged there.

    A learner compares what it is told only with the rounds that its own process answered. So the share of an earlier
    process misleads nobody: it may arrive while the greeting of the new process is lost. The rule excludes a version
    that replaces a lost one, because the syncer has lost which values it holds.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Round and learner -> the process whose value the syncer keeps.
        self._given: dict[tuple[int, str], Incarnation] = {}
        # Process, fragment and round of each value that was sent.
        self._sent: set[tuple[Incarnation, int, int]] = set()
        # Round -> fragment and learners.
        self._merging: dict[int, tuple[int, tuple[str, ...]]] = {}
        # Lineage, fragment, round, and each process whose value is merged there.
        self._merged: set[tuple[int, int, int, Incarnation]] = set()
        # Lineage, fragment and version of each value that a fragment continues with after a loss.
        self._goes_on: set[tuple[int, int, int]] = set()

    def on_merged(self, global_step: int, excluded: tuple[str, ...], now_s: float) -> None:
        fragment_id, names = self._merging.pop(global_step)
        incarnations = [self._given.pop((global_step, name)) for name in names]
        used = [each for each in incarnations if each[0] not in excluded]
        self._merged |= {(self.lineage, fragment_id, global_step, each) for each in used}

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if isinstance(message, FragmentValue) and not _dropped(message, effects):
            self._given[message.global_step, message.learner_id] = (message.learner_id, message.incarnation)
        for effect in effects:
            if isinstance(effect, Merge):
                names = tuple(each.learner_id for each in effect.contributions)
                self._merging[effect.global_step] = (effect.fragment_id, names)
            elif isinstance(effect, Note) and effect.kind == "lost":
                version = self.cluster.syncer.versions[effect.fragment_id]
                self._goes_on.add((self.lineage, effect.fragment_id, version))

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        if isinstance(message, GlobalFragment) and any(isinstance(effect, Adopt) for effect in effects):
            self._adopt(process.key, message)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, FragmentValue):
                self._sent.add((process.key, effect.message.fragment_id, effect.message.global_step))

    def _adopt(self, incarnation: Incarnation, message: GlobalFragment) -> None:
        lineage, told = self.lineages.get(message.epoch, -1), message.merged_round
        concerns = (incarnation, message.fragment_id, told) in self._sent
        true = not concerns or (lineage, message.fragment_id, told, incarnation) in self._merged
        self.check(
            true and told <= message.version, f"{incarnation} is told of a share that it does not have: {message}"
        )
        version = (lineage, message.fragment_id, message.version)
        share = (*version, incarnation) in self._merged and version not in self._goes_on
        self.check(not share or told == message.version, f"{incarnation} is not told of its share: {message}")


class QuorumHolds(Checker):
    """A round closes with at least K learners, each with a step that no round has counted, and merges only them."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Learner -> newest (incarnation, local_step).
        self._reported: dict[str, tuple[int, int]] = {}
        self._counted: dict[str, tuple[int, int]] = {}
        self._closed: dict[int, tuple[str, ...]] = {}

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if isinstance(message, StepReport):
            newest = (message.incarnation, message.local_step)
            self._reported[message.learner_id] = max(newest, self._reported.get(message.learner_id, newest))
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "closed":
                self._close(effect)
            elif isinstance(effect, Merge):
                members = self._closed.pop(effect.global_step, ())
                names = {each.learner_id for each in effect.contributions}
                self.check(bool(names) and names <= set(members), f"{effect}, but the round closed with {members}")

    def _close(self, note: Note) -> None:
        members, quorum = note.members, self.config.quorum
        self.check(
            len(set(members)) == len(members) >= quorum,
            f"round {note.global_step} closes with {members}, the quorum is {quorum}",
        )
        for name in members:
            reported = self._reported.get(name, (0, 0))
            counted = self._counted.get(name, (0, 0))
            self.check(
                reported > counted or name in self.hostile,
                f"round {note.global_step} counts {name} at {reported}, counted was {counted}",
            )
            self._counted[name] = reported
        if note.fragment_id >= 0:
            self._closed[note.global_step] = members


class ClosesForAReason(Checker):
    """A round closes because all live learners have reported, or because one of two waits for the others is over."""

    REASONS = re.compile(
        r"(?P<all>all (?P<n>\d+) live learners reported"
        r"|(?P<fresh>\d+) of (?P<live>\d+) live learners reported, (grace window|least wait) over)(, without .*)?"
    )

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "closed":
                found = self.REASONS.fullmatch(effect.reason)
                self.check(found is not None, f"round {effect.global_step} closes for no reason: {effect.reason!r}")
                assert found is not None
                reported = int(found["n"] or found["fresh"])
                right = reported == len(effect.members) and (found["n"] or reported <= int(found["live"]))
                self.check(bool(right), f"round {effect.global_step} closes with {effect.members}: {effect.reason!r}")


class RoundsBounded(Checker):
    """At most max(1, tau) rounds are in flight, never two of one fragment, and every one ends."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Round -> fragment.
        self._flying: dict[int, int] = {}
        # Rounds of an earlier process of the syncer, whose end may still be reported.
        self._cut_short: set[int] = set()

    def on_syncer_died(self, machine: Syncer, now_s: float) -> None:
        self._cut_short |= set(self._flying)
        self._flying.clear()

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        if rewound_to >= 0:
            self._cut_short.clear()

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        for effect in effects:
            if not isinstance(effect, Note):
                continue
            if effect.kind in ("merged", "abandoned"):
                if effect.global_step in self._cut_short:
                    self._cut_short.remove(effect.global_step)
                    continue
                self.check(effect.global_step in self._flying, f"{effect.kind} without being closed: {effect}")
                del self._flying[effect.global_step]
            elif effect.kind == "closed" and effect.fragment_id >= 0:
                twice = effect.fragment_id in self._flying.values()
                self.check(not twice, f"fragment {effect.fragment_id} is in flight twice: {self._flying}, {effect}")
                self._flying[effect.global_step] = effect.fragment_id
                limit = max(1, self.config.overlap_steps)
                self.check(len(self._flying) <= limit, f"{len(self._flying)} rounds are in flight, limit {limit}")

    def end(self) -> None:
        if self.cluster.syncer.finished:
            self.check(not self._flying, f"rounds never ended: {self._flying}")


class OwedAreAskedLess(Checker):
    """After n pulls in a row without an answer, a learner is asked again 2^(n-1) rounds later, at most 64.

    It is asked sooner if the others do not meet the quorum.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Learner -> rounds in a row that ended without its answer; and learner -> rounds that wait for its answer.
        self._missed: dict[str, list[int]] = defaultdict(list)
        self._waiting: dict[str, set[int]] = defaultdict(set)
        # Learner -> round -> step of its value, which counts once the learner has reported that step.
        self._answers: dict[str, dict[int, int]] = defaultdict(dict)

    def on_syncer_died(self, machine: Syncer, now_s: float) -> None:
        self._missed.clear()
        self._waiting.clear()
        self._answers.clear()

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if isinstance(message, FragmentValue) and message.global_step in self._waiting[message.learner_id]:
            # A wrong value is an answer too.
            self._answers[message.learner_id].setdefault(message.global_step, message.local_step)
        if isinstance(message, FragmentValue | StepReport):
            self._count(message.learner_id)
        for effect in effects:
            if isinstance(effect, Note) and effect.kind in ("left", "disconnected", "silent", "joined"):
                # Nobody waits for this learner any more, and a new incarnation owes nothing.
                self._waiting.pop(effect.members[0], None)
                if effect.kind == "joined":
                    self._missed.pop(effect.members[0], None)
            elif isinstance(effect, Note) and effect.kind == "closed" and effect.fragment_id >= 0:
                self._close(effect)
            elif isinstance(effect, Merge | Discard):
                for name, rounds in self._waiting.items():
                    if effect.global_step in rounds:
                        rounds.remove(effect.global_step)
                        self._missed[name].append(effect.global_step)

    def _count(self, name: str) -> None:
        member = self.cluster.syncer.membership.members.get(name)
        reported = member.local_step if member is not None else -1
        for global_step, local_step in list(self._answers[name].items()):
            if global_step not in self._waiting[name]:
                del self._answers[name][global_step]
            elif local_step <= reported:
                del self._answers[name][global_step]
                self._missed.pop(name, None)
                self._waiting[name].remove(global_step)

    def _close(self, note: Note) -> None:
        live = {member.learner_id for member in self.cluster.syncer.membership.live_members()}
        # An answer that held the next round up does not end what its learner owes. The times of that are the machine's.
        sound = (
            live - self.cluster.syncer.rounds.owing.keys() - {name for name, rounds in self._missed.items() if rounds}
        )
        for name in note.members:
            missed, others = self._missed.get(name, ()), len(sound - {name})
            if missed and others >= self.config.quorum:
                due = max(missed) + min(2 ** (len(missed) - 1), 64)
                self.check(note.global_step >= due, f"{name} owes {missed}, but {note} asks it before round {due}")
            self._waiting[name].add(note.global_step)


class QuarantineHolds(Checker):
    """A value that could not be used never counts; strikes_max of them in a row end its incarnation for good."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Learner -> incarnation that the syncer knows.
        self._connected: dict[str, int] = {}
        # Learner and round -> incarnation of the value.
        self._values: dict[tuple[str, int], int] = {}
        self._excluded: dict[int, tuple[str, ...]] = {}
        # The round whose end the syncer is getting.
        self._ending: int | None = None
        self._strikes: dict[Incarnation, int] = defaultdict(int)
        self._expelled: set[Incarnation] = set()

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        self._ending = None
        self._connected.clear()
        if rewound_to >= 0:
            self._values.clear()

    def on_merged(self, global_step: int, excluded: tuple[str, ...], now_s: float) -> None:
        self._excluded[global_step] = excluded
        self._ending = global_step

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        sender = (message.learner_id, message.incarnation) if message is not None else None
        if isinstance(message, FragmentValue) and self._connected.get(message.learner_id) == message.incarnation:
            self._values.setdefault((message.learner_id, message.global_step), message.incarnation)
        ending, self._ending = self._ending, None
        if sender in self._expelled:
            self.check(all(map(_rejects, effects)), f"a message of {sender}, who was expelled, led to {effects}")
        if ending is not None:
            self._end_round(ending, effects)
        for effect in effects:
            if isinstance(effect, Note) and effect.kind in ("left", "disconnected"):
                self._connected.pop(effect.members[0], None)
            elif isinstance(effect, Send) and isinstance(effect.message, Welcome) and sender is not None:
                self._connected[effect.peer] = sender[1]

    def _end_round(self, global_step: int, effects: list[Effect]) -> None:
        excluded = self._excluded[global_step]
        merged: tuple[str, ...] = ()
        for effect in effects:
            if isinstance(effect, Note) and (effect.kind, effect.global_step) == ("merged", global_step):
                merged = effect.members
        both = set(excluded) & set(merged)
        self.check(not both, f"round {global_step} counts {sorted(both)}, whose values were not usable")
        for name in merged:
            self._strikes[name, self._values[name, global_step]] = 0
        for incarnation in [(name, self._values[name, global_step]) for name in excluded]:
            if self._connected.get(incarnation[0]) != incarnation[1]:
                # The learner is not connected.
                continue
            self._strikes[incarnation] += 1
            if self._strikes[incarnation] >= self.config.strikes_max:
                told = any(
                    isinstance(e, Send) and e.peer == incarnation[0] and isinstance(e.message, Expel) for e in effects
                )
                self.check(
                    told,
                    f"{incarnation} has {self._strikes[incarnation]} values in a row that were not usable, but stays",
                )
                self._expelled.add(incarnation)


def _dropped(message: LearnerMessage, effects: Effects) -> bool:
    return any(isinstance(effect, Drop) and effect[::2] == (message.learner_id, -1) for effect in effects)


def _rejects(effect: Effect) -> bool:
    return isinstance(effect, Drop) or (isinstance(effect, Send) and isinstance(effect.message, Refuse))
