"""The schedule, format and connections that a link calls for, with reasons.

The config's own settings stay where they are good enough. Where they are not, what costs the least training quality
changes first: the format (int4 with error feedback: 0.2 % of the loss in our runs), then P, then H.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from diloco_jax.core.codec import Format
from diloco_jax.protocol.pacing import OVERLAP_STEPS_MAX
from diloco_jax.sim.goodput.bandwidth import GBIT
from diloco_jax.tools.budget.memory import size
from diloco_jax.tools.plan.case import Case, changed
from diloco_jax.tools.plan.forecast import FORMATS, recovery, syncer_load
from diloco_jax.transport.link import STRIPES_MAX

BUSY_MAX = 0.7  # share of a link that rounds may fill on average: joins, repairs and states need the rest
OVERLAP_MIN, OVERLAP_MAX = 2, 5  # the paper's tau; more than 5 costs quality (arXiv 2501.18512)
SYNC_EVERY_MAX = 500  # DiLoCo's H
Advice = dict[str, Any]


class ScheduleChoice(NamedTuple):
    """A schedule with formats, as a case, and what the link makes of it."""

    case: Case
    up: Format
    down: Format
    overlap_needed: int
    busy: float  # planned rate over the payload rate of the link

    @property
    def fits(self) -> bool:
        """Tell if the link carries it with room to spare."""
        return self.busy <= BUSY_MAX and self.overlap_needed <= OVERLAP_MAX


def advise(case: Case) -> list[Advice]:
    """Make one entry per setting: its name, the value that is recommended, the config's, and the reason.

    Args:
      case: config and assumptions.
    """
    stripes = stripes_for(case)
    choice = choose(case, stripes)
    return [*_schedule(case, choice), _stripes(case, stripes), *_others(case, choice, stripes)]


def stripes_for(case: Case) -> int:
    """Choose each learner's connections: the config's if they carry rounds and recoveries, else enough for the link."""
    now, share = case.config.transport.stripes, case.given.link_gbit_per_s / case.per_site
    fill = min(STRIPES_MAX, max(1, math.ceil(share / case.stripe_gbit_per_s)))
    back = recovery(case)
    wire = case.config.wire
    own, most = (_choice(case, wire.up, wire.down, count) for count in (now, max(now, fill)))
    carries = own.busy <= BUSY_MAX and own.overlap_needed <= max(OVERLAP_MAX, most.overlap_needed)
    enough = carries and back["global_model_s"] + back["state_s"] <= back["state_limit_s"]
    return now if enough else max(now, fill)


def _choice(case: Case, up: Format, down: Format, stripes: int) -> ScheduleChoice:
    rate, rounds = case.usable_gbit_per_s(stripes), case.rounds(up, down)
    return ScheduleChoice(case, up, down, rounds.overlap_needed(rate), rounds.planned_gbit_per_s / rate)


def choose(case: Case, stripes: int) -> ScheduleChoice:
    """Find the first choice that fits, else one with nearly the shortest overlap, or that fills the link least.

    Args:
      case: config and assumptions.
      stripes: connections of each learner.
    """
    tried = []
    for there, up, down in _candidates(case):
        tried.append(_choice(there, up, down, stripes))
        if tried[-1].fits:
            return tried[-1]
    carried = [each for each in tried if each.busy <= BUSY_MAX]
    if not carried:
        return min(tried, key=lambda each: each.busy)
    least = min(each.overlap_needed for each in carried)
    return next(each for each in carried if each.overlap_needed <= least + 1)  # latency alone calls for that much


def _candidates(case: Case) -> Iterator[tuple[Case, Format, Format]]:
    protocol, wire = case.config.protocol, case.config.wire
    pieces_max = case.config.transport.queue_payloads_max  # a joining learner gets all fragments at once
    narrower = FORMATS[max(FORMATS.index(wire.up), FORMATS.index(wire.down)) :]
    formats = [(wire.up, wire.down), *((each, each) for each in narrower if (each, each) != (wire.up, wire.down))]
    sync_every = protocol.sync_every
    while True:
        own = min(protocol.num_fragments, sync_every)
        for fragments in dict.fromkeys((own, min(sync_every, pieces_max))):
            try:
                there = changed(
                    case, sync_every=sync_every, num_fragments=fragments, overlap_steps=max(1, protocol.overlap_steps)
                )
            except ValueError:  # the model has not so many pieces
                continue
            for up, down in formats:
                yield there, up, down
        if sync_every >= SYNC_EVERY_MAX:
            return
        sync_every = min(2 * sync_every, SYNC_EVERY_MAX)


def _entry(setting: str, value: object, now: object, why: str) -> Advice:
    return {"setting": setting, "value": value, "now": now, "change": value != now, "why": why}


def _schedule(case: Case, choice: ScheduleChoice) -> list[Advice]:
    """Advise on H, P, tau and the formats."""
    protocol, wire = case.config.protocol, case.config.wire
    there = choice.case.config.protocol
    rounds = choice.case.rounds(choice.up, choice.down)
    own = case.rounds(wire.up, wire.down)
    rate = rounds.planned_gbit_per_s / choice.busy
    overlap = min(max(choice.overlap_needed, OVERLAP_MIN), OVERLAP_STEPS_MAX)
    if protocol.overlap_steps >= overlap:
        overlap = protocol.overlap_steps
    period_s = there.sync_every * case.step_s
    carries = f"each learner moves {rounds.planned_gbit_per_s:.3g} of {rate:.3g} Gbit/s on average"
    if choice.busy <= BUSY_MAX:
        why_h = (
            f"{carries}, {choice.busy:.0%}, with every fragment once per {there.sync_every} steps ({period_s:.3g} s)"
        )
        why_h += "; a smaller H means less drift, so it is not raised without need"
    else:
        why_h = f"{carries}: {choice.busy:.0%}, more than {BUSY_MAX:.0%} even with the largest H that is tried"
    if there.num_fragments == there.sync_every:
        why_p = f"one fragment of at most {size(rounds.up_bytes)} goes up in every step, so the link is evenly filled"
    else:
        why_p = (
            f"the largest of {there.num_fragments} fragments is {size(rounds.up_bytes)} and moves up and down in "
            f"{(rounds.up_bytes + rounds.down_bytes) / (rate * GBIT):.3g} s; more fragments are not needed"
        )
    takes = f"a round takes {rounds.round_s(rate):.3g} s over this link"
    parts = (
        f"half a step for reports, {1.5 * case.given.round_trip_ms:.3g} ms for 1.5 round trips, {rounds.merge_s:.2g} s "
        f"to merge, {(rounds.up_bytes + rounds.down_bytes) / (rate * GBIT):.2g} s up and down"
    )
    why_tau = f"{takes} ({parts}), which is {rounds.round_s(rate) / case.step_s:.2g} steps of {case.step_s:.3g} s"
    why_tau += f"; at least {OVERLAP_MIN} leave room for the grace window"
    if choice.overlap_needed > OVERLAP_MAX:
        why_tau += f"; more than {OVERLAP_MAX} costs quality (arXiv 2501.18512): make steps longer by larger batches"
        why_tau += ", or bring the syncer nearer"
    if protocol.lockstep:
        waits = 1 - case.rounds(wire.up, wire.down).utilisation(rate)
        why_tau += f"; with 0 learners wait for {waits:.1%} of the time, which is right for synchronous DiLoCo only"
    own_busy = own.planned_gbit_per_s / rate
    if (choice.up, choice.down) == (wire.up, wire.down):
        why_wire = f"{carries} in these formats"
    else:
        why_wire = f"{wire.up} up and {wire.down} down would fill {own_busy:.0%} of {rate:.3g} Gbit/s on average"
        why_wire += f", or take {case.rounds(wire.up, wire.down).round_s(rate) / case.step_s:.2g} steps a round"
    why_wire += "; int4 both ways with error feedback cost 0.2 % of the loss in our runs (docs/log.md)"
    return [
        _entry("protocol.sync_every", there.sync_every, protocol.sync_every, why_h),
        _entry("protocol.num_fragments", there.num_fragments, protocol.num_fragments, why_p),
        _entry("protocol.overlap_steps", overlap, protocol.overlap_steps, why_tau),
        _entry("wire.up", choice.up, wire.up, why_wire),
        _entry("wire.down", choice.down, wire.down, why_wire.replace(" moves ", " gets ", 1)),
    ]


def _stripes(case: Case, stripes: int) -> Advice:
    now, given, each = case.config.transport.stripes, case.given, case.stripe_gbit_per_s
    share = given.link_gbit_per_s / case.per_site
    if not given.round_trip_ms:
        return _entry("transport.stripes", stripes, now, "without a round trip one connection fills the link")
    why = (
        f"a window of {given.tcp_window_mb:.3g} MB per {given.round_trip_ms:.3g} ms lets one connection move about "
        f"{each:.3g} Gbit/s (two thirds of the window, measured), and each learner has {share:.3g} Gbit/s"
    )
    if stripes == now and stripes * each < share:
        why += f"; {now} carry rounds and recoveries" if stripes < STRIPES_MAX else ""
    if stripes == STRIPES_MAX and stripes * each < share:
        why += f"; {STRIPES_MAX} is the most, so raise net.ipv4.tcp_rmem and tcp_wmem too, and say --tcp-window-mb"
    return _entry("transport.stripes", stripes, now, why)


def _others(case: Case, choice: ScheduleChoice, stripes: int) -> list[Advice]:
    """Advise on payloads, the syncer's load and recoveries, but only where something must change."""
    config = choice.case.config
    wire = replace(config.wire, up=choice.up, down=choice.down)
    transport = replace(config.transport, stripes=stripes)
    there = replace(choice.case, config=replace(config, wire=wire, transport=transport))
    rounds = there.rounds(choice.up, choice.down)
    found: list[Advice] = []
    rate = rounds.planned_gbit_per_s / choice.busy
    load = syncer_load(there)
    if load["shards"] > max(1, config.syncer.shards):
        why = f"learners send {load['mb_per_s_in']:.3g} MB/s, of which one process merged {case.given.shard_mb_per_s:g}"
        found.append(_entry("syncer.shards", load["shards"], config.syncer.shards, f"{why} in our measurements"))
    if rounds.round_s(rate) > config.protocol.pull_timeout_s:
        wait = math.ceil(2 * rounds.round_s(rate))
        why = f"a round takes {rounds.round_s(rate):.3g} s, and after this time it goes on without who is late"
        found.append(_entry("protocol.pull_timeout_s", float(wait), config.protocol.pull_timeout_s, why))
    whole = 4 * max(each.num_elements for each in there.plan.fragments) / max(1, config.syncer.shards)
    if whole > config.transport.payload_bytes_max:
        why = f"a joining learner gets fragments whole, in float32, and the largest has {size(whole)}"
        most = 1 << math.ceil(math.log2(whole))
        found.append(_entry("transport.payload_bytes_max", most, config.transport.payload_bytes_max, why))
    back = recovery(there)
    if back["state_bytes"] and not back["state_arrives"]:
        why = (
            f"a neighbour's state of {back['state_bytes'] / 1e9:.3g} GB takes {back['state_s']:.3g} s beside rounds, "
            f"but a transfer may take H steps, {back['state_limit_s']:.3g} s: it would be tried in vain. Without it a "
            "returning island begins with the global model and new moments of the inner optimizer; a larger H or a "
            "faster link would carry it"
        )
        found.append(_entry("protocol.recover_from_peers", False, True, why))
    return found
