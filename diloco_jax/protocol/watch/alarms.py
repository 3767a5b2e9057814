"""Alarms of a run: what is wrong, the evidence, and what to do about it. No rule reads them.

Log, status, metrics, page and summary show the same alarms. This module finds those of the protocol, also in simulated
runs; runtime/syncer/machine_alarms.py finds those of the syncer's machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from diloco_jax.protocol.watch.health import conditions
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.protocol.watch.terms import STARVED, WAITING, shown

if TYPE_CHECKING:
    from diloco_jax.protocol.syncer.machine import Syncer

# Alarms of a run that are kept apart.
KEPT_MAX = 64
# By kind: what to do about an alarm.
REMEDIES = {
    "silent": "look at its process and its network; its log is in logs/ of the run's folder where it runs",
    "gone": "look at its machine and its log; if nothing restarts it there, start it again with the same command: it "
    "may come back under its name at any time",
    "missing": "look at the queue and the machines of the islands that are away, or lower islands.least",
    "quorum": "start the islands that are away, or lower protocol.quorum",
    "expelled": "lower its learning rate or change its hardware, then start it again",
    "striking": "values that are not usable come from NaN or a high learning rate; look at its loss and its log",
    "unmerged": "check its link (`diloco doctor`); a larger protocol.overlap_steps gives it more time",
    "unanswered": "look at its log, and measure its link (`diloco doctor`); a larger protocol.resend_s gives its "
    "answers more time, and others wait for as long",
    "slow": "look at its machine; fewer samples make its steps shorter: islands.each.NAME.batch_size, or the batch in "
    "your own loop",
    "starved": "a larger data.prefetch, or a faster disk or network for the data",
    "loss": "look at its log and its data; a lower optimizer.learning_rate or clipping, and --resume from a snapshot",
    "drift": "compare its data, learning rate and batch with those of the others, and look at its loss; nothing "
    "excludes it, so `diloco drain` it if the evaluation loss suffers",
    "link": "`diloco doctor` measures it; a smaller wire format, a longer protocol.sync_every or overlap_steps",
    "outrun": "see what rounds wait for; give the syncer processors; lengthen protocol.sync_every",
    "few": "set protocol.quorum to the number of islands, or raise protocol.grace_steps_max: rounds then wait for more "
    "of them; a larger protocol.overlap_steps leaves time for that",
    "unmerged-fragments": "make the run longer than protocol.sync_every, and see in the syncer's log how rounds ended",
    "tape": "do what the alarm says, such as to free space; rounds continue by themselves",
    "snapshot": "do what the alarm says, such as to free space; the next snapshot is tried by itself",
    "disk": "free space there, or lower checkpoints.keep; a full disk stops the merging, not the training",
    "certificate": "`diloco certs FOLDER ... --renew 30`, and copy the new files over the old ones; no restart",
    "clock": "let NTP (chrony, systemd-timesyncd) set both clocks; logs and certificates need them",
    "rising": "look at that data and at its island's share in rounds; more weight (merge.shares), or a shorter "
    "protocol.sync_every, helps a corpus that differs from the others",
    "band": "`diloco compare` shows what differs from that run; look at the learning rate, and at how many islands "
    "rounds merge",
    "harm": "look at its data, its loss and its drift; nothing excludes it, so `diloco drain` or `diloco ban` it if "
    "the evaluation loss suffers",
    "evaluation": "`diloco eval RUN` evaluates a snapshot; the next evaluation is asked for by itself",
}
# By kind: the text of an alarm that is over.
PAST = {
    "silent": "{who} was silent",
    "gone": "{who} was disconnected",
    "missing": "fewer islands were connected than the run needs",
    "quorum": "fewer islands were connected than a round needs",
    "expelled": "{who} was expelled",
    "striking": "{who} sent values that were not usable",
    "unmerged": "{who} had no share in rounds",
    "unanswered": "{who} did not answer requests for values",
    "slow": "{who} was slow",
    "starved": "{who} waited for its data",
    "loss": "a loss {of_who} was not as it should be",
    "drift": "the contributions of {who} differed much from those of the others",
    "link": "the link of {who} was too slow",
    "outrun": "islands outran rounds",
    "few": "rounds merged few of the live islands",
    "unmerged-fragments": "fragments were not merged",
    "tape": "the tape could not be written",
    "snapshot": "a snapshot was overdue or failed",
    "disk": "the syncer's disk was nearly full",
    "certificate": "a certificate was about to expire",
    "clock": "the clock of {who} was wrong",
    "rising": "the loss on one corpus rose",
    "band": "the evaluation loss was above that of evaluation.baseline",
    "harm": "the model was better without the contributions of {who}",
    "evaluation": "an evaluation failed",
}
# An alarm is raised again after so many seconds without its cause, or with it, so that logs stay short.
CALM = 5.0
# Before alarms of these kinds, gaps shorter than CALM count as part of the trouble: a link may break again and again.
FLAPPING = ("gone",)
# By kind: seconds before an alarm is raised. A shorter trouble is harmless, or belongs to a restart of the syncer.
HOLDS = {"gone": 5.0, "missing": 600.0, "quorum": 60.0, "slow": 10.0, "starved": 10.0, "link": 3.0, "few": 5.0}


class Alarm(NamedTuple):
    """One thing that is wrong."""

    # One of REMEDIES.
    kind: str
    # An island, or "" for the run.
    who: str
    # Description with the numbers that are the evidence.
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return the alarm with its remedy."""
        return {**self._asdict(), "remedy": REMEDIES[self.kind]}

    @property
    def past(self) -> str:
        """Describe an alarm that is over, without numbers."""
        of_who = f"of {self.who}" if self.who else "of the global model"
        return PAST[self.kind].format(who=self.who, of_who=of_who)


def alarms_of(syncer: Syncer, stats: RunStats, now_s: float) -> list[Alarm]:
    """List the alarms of a run that the machine's state shows; none once the run is complete."""
    if syncer.finished:
        return []
    stats.links.look(syncer, now_s)
    median_s = syncer.membership.median_step_s()
    alarms = [Alarm("outrun", "", stats.outrun)] if stats.outrun else []
    connected, least, quorum = len(syncer.membership.connected()), stats.least, syncer.config.quorum
    few = f"{connected} island{' is' if connected == 1 else 's are'} connected, fewer than"
    if connected < least:
        alarms.append(Alarm("missing", "", f"{few} islands.least ({least})"))
    if 0 < connected < quorum:
        alarms.append(Alarm("quorum", "", f"{few} protocol.quorum ({quorum}), so no round closes"))
    for condition in conditions(syncer, now_s):
        name = condition.learner_id
        # An island beyond those that the run needs may lose its machine at any time.
        spare = condition.condition == "gone" and 0 < least <= connected
        if condition.condition in REMEDIES and not spare:
            alarms.append(
                Alarm(condition.condition, name, f"{name} is {shown(condition.condition)}: {condition.reason}")
            )
        if syncer.membership.members[name].state != "active":
            continue
        if trouble := stats.losses.trouble(name):
            alarms.append(Alarm("loss", name, f"{name}: {trouble}"))
        if way := stats.links.trouble(syncer, name, median_s):
            text = f"a fragment takes {way.took_s:.1f} s to and from {name}; {way.allowed_s:.1f} s are hidden by steps"
            alarms.append(Alarm("link", name, text))
    stats.crowd.look(syncer, {alarm.who for alarm in alarms})
    if stats.crowd.trouble:
        alarms.append(Alarm("few", "", stats.crowd.trouble))
    # An island that drifts takes part in rounds, so the crowd above counts it.
    for name, member in syncer.membership.members.items():
        if member.state == "active" and (trouble := stats.drifts.trouble(name)):
            alarms.append(Alarm("drift", name, f"{name}: {trouble}"))
    return alarms


def starving(metrics: Mapping[str, Mapping[str, float]]) -> list[Alarm]:
    """List the islands that wait long for their data, from the newest metrics of active islands."""
    shares = {name: values.get(WAITING, 0.0) for name, values in metrics.items()}
    words = "waits for its data for {:.0%} of its time"
    return [
        Alarm("starved", name, f"{name} {words.format(share)}") for name, share in shares.items() if share >= STARVED
    ]


@dataclass(slots=True)
class Standing:
    """An alarm from its start to its end."""

    # The alarm with its newest text.
    alarm: Alarm
    # Start and end on the run's clock.
    from_s: float
    until_s: float
    # Whether the alarm is not over.
    stands: bool
    # How often the alarm was raised, and how long it lasted before this time.
    times: int = 1
    before_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the alarm for the summary; `lasted_s` is the sum over all times."""
        from_s, until_s, lasted_s = self.from_s, self.until_s, self.before_s + self.until_s - self.from_s
        times = {"from_s": round(from_s, 1), "until_s": round(until_s, 1), "lasted_s": round(lasted_s, 1)}
        over = {} if self.stands else {"past": self.alarm.past}
        return {**self.alarm.as_dict(), **times, "times": self.times, "stands": self.stands, **over}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Standing:
        """Make the alarm that `record` described."""
        before_s = record["lasted_s"] - (record["until_s"] - record["from_s"])
        alarm = Alarm(record["kind"], record["who"], record["text"])
        return cls(alarm, record["from_s"], record["until_s"], record["stands"], record["times"], before_s)


class AlarmBook:
    """The alarms of a run: those that stand now, and those that are over.

    An alarm stands once every look has found it for HOLDS seconds. It ends at the first look that does not find it.

    Args:
        earlier: the alarms of the syncer's earlier epochs.
    """

    def __init__(self, earlier: Iterable[Standing] = ()) -> None:
        # Kind and island -> the first look that found the trouble, without a gap since, and when its alarm is due.
        self._found_s: dict[tuple[str, str], tuple[float, float]] = {}
        # Kind and island -> the newest look that found the trouble.
        self._last_s: dict[tuple[str, str], float] = {}
        known = [each for each in earlier if each.alarm.kind in REMEDIES]
        self._episodes = {(each.alarm.kind, each.alarm.who): each for each in known[:KEPT_MAX]}

    def look(self, alarms: Iterable[Alarm], now_s: float) -> tuple[list[Alarm], list[Alarm]]:
        """Record what is wrong at this moment; return the alarms that start and those that end."""
        newest = {(alarm.kind, alarm.who): alarm for alarm in alarms}
        over = [key for key, episode in self._episodes.items() if episode.stands and key not in newest]
        for key in self._found_s.keys() - newest.keys():
            if key in over or key[0] not in FLAPPING or now_s - self._last_s[key] >= CALM:
                del self._found_s[key]
        for key in newest:
            if key not in self._found_s:
                again = key in self._episodes and now_s - self._last_s.get(key, -inf) < CALM
                hold_s = HOLDS.get(key[0], 0.0)
                self._found_s[key] = now_s, now_s + (max(hold_s, CALM) if again else hold_s)
            self._last_s[key] = now_s
        for key in over:
            self._episodes[key].stands = False
        begun = []
        for key, alarm in newest.items():
            episode = self._episodes.get(key)
            if episode is not None and episode.stands:
                episode.alarm, episode.until_s = alarm, now_s
            elif now_s >= self._found_s[key][1]:
                if episode is None and len(self._episodes) >= KEPT_MAX:
                    continue
                times = 1 if episode is None else episode.times + 1
                before_s = 0.0 if episode is None else episode.as_dict()["lasted_s"]
                from_s = self._found_s[key][0]
                self._episodes[key] = Standing(alarm, from_s, now_s, stands=True, times=times, before_s=before_s)
                begun.append(alarm)
        return begun, [self._episodes[key].alarm for key in over]

    @property
    def standing(self) -> list[Alarm]:
        """Return the alarms that stand now, in the order of their first start."""
        return [episode.alarm for episode in self._episodes.values() if episode.stands]

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return every alarm that ever stood, for the summary."""
        return [episode.as_dict() for episode in self._episodes.values()]
