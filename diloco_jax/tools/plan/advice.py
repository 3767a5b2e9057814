"""Advice on turns, formats and connections for a link, with reasons.

The config's settings are kept if they are good enough. Otherwise the setting that costs the least training quality
changes first: the format (int4 with error feedback cost 0.2 % of the loss in our runs, int2 not more), then P, then H.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from diloco_jax.core.codec import FORMATS
from diloco_jax.protocol.pacing import OVERLAP_STEPS_MAX, RECOVERY_TURNS_MAX, WAIT_STEPS_MAX, ProtocolConfig
from diloco_jax.protocol.turns import Periods
from diloco_jax.sim.goodput.bandwidth import GBIT, TRIPS, Rounds
from diloco_jax.tools.budget.figures import size
from diloco_jax.tools.plan.bucket import HOPS, request_figures
from diloco_jax.tools.plan.case import BUSY_MAX, Case, changed
from diloco_jax.tools.plan.forecast import bucket_traffic, recovery, wait
from diloco_jax.tools.plan.rates import OF_ADAPTERS, OFF_BY, rate_factor
from diloco_jax.tools.plan.slices import slices_advice
from diloco_jax.tools.plan.verdict import MADE_MIN
from diloco_jax.transport.link import STRIPES_MAX

# The range of tau: the paper's value, and the largest one that does not cost quality (arXiv 2501.18512).
OVERLAP_MIN, OVERLAP_MAX = 2, 5
# The advised limit of a transfer's time over its expected time.
RECOVERY_ROOM = 1.5
# The shortest poll interval that is advised, in seconds: each look takes a request's time.
POLL_MIN_S = 0.05
# DiLoCo's H.
SYNC_EVERY_MAX = 500
Advice = dict[str, Any]


class ScheduleChoice(NamedTuple):
    """A candidate: a case with its turns and formats, and the payload rate of its link."""

    case: Case
    rounds: Rounds
    rate: float  # Gbit/s

    @property
    def overlap_needed(self) -> int:
        """Return the number of steps that a round takes."""
        return self.rounds.overlap_needed(self.rate)

    @property
    def busy(self) -> float:
        """Return the planned rate over the payload rate of the link, or the syncer's load if that is more."""
        return max(self.rounds.planned_gbit_per_s / self.rate, self.case.syncer_busy, self.case.syncer_link_busy)

    @property
    def fits(self) -> bool:
        """Return whether the link carries the rounds with room to spare, in a time that the shortest period allows."""
        shortest = min(min(phase.periods) for phase in self.case.config.protocol.groups.phases)
        in_time = self.overlap_needed <= min(OVERLAP_MAX, shortest - 1)
        return self.busy <= BUSY_MAX and in_time and (self.paced or not self.case.by_bucket)

    @property
    def paced(self) -> bool:
        """Return whether rounds are due no more often than they can follow each other."""
        return self.rounds.due_s >= MADE_MIN * self.rounds.pace_s(self.rate)


def advise(case: Case) -> list[Advice]:
    """Return one entry per setting with its name, the recommended value, the config's value, and the reason.

    `change` is None if the right value depends on what only the user knows; the reason says how to compare.
    """
    stripes = stripes_for(case)
    if case.by_bucket:
        there = changed(case, transport={"poll_s": poll_for(case)})
        choice = choose(there, stripes)
        own = _poll(case, there, choice)
    else:
        choice = choose(case, stripes)
        own = _stripes(case, stripes)
    return [*_turns(case, choice), own, *_rate(choice), *_budget(case), *_others(choice, stripes), *slices_advice(case)]


def poll_for(case: Case) -> float:
    """Choose the poll interval of a bucket: the config's, or a shorter one if fragments would return too late."""
    now, rounds = case.config.transport.poll_s, case.rounds()
    late_s = rounds.age_s(case.usable_gbit_per_s()) - OVERLAP_MAX * case.step_s
    shorter = now - late_s / HOPS
    return now if late_s <= 0 or shorter < POLL_MIN_S else float(f"{0.99 * shorter:.2g}")


def _poll(case: Case, there: Case, choice: ScheduleChoice) -> Advice:
    """Advise on the poll interval, with the price of its requests."""
    now, poll_s = case.config.transport.poll_s, there.config.transport.poll_s
    figures = request_figures(case.config.transport.address, bucket_traffic(choice.case))
    why = f"each island looks for messages once per interval, and a round passes the bucket {HOPS} times"
    if poll_s < now:
        steps = case.rounds().overlap_needed(choice.rate)
        why += f"; with {now:g} s a version would arrive after {steps} steps, and more than {OVERLAP_MAX} cost quality "
        why += "(arXiv 2501.18512)"
    elif choice.overlap_needed > OVERLAP_MAX:
        why += ", but a shorter interval alone does not bring versions back in time"
    price = figures["price_per_day"]
    cost = "" if price is None else f", for {price:,.2f} dollars"
    why += f"; that is {figures['requests_per_day']:,.0f} requests per day of all processes{cost}"
    return _entry("transport.poll_s", poll_s, now, why)


def stripes_for(case: Case) -> int:
    """Choose the number of connections: the config's if it carries rounds and recoveries, else enough for the link."""
    now, share = case.config.transport.stripes, case.assumed.link_gbit_per_s / case.per_site
    if case.by_bucket:
        return now
    fill = min(STRIPES_MAX, max(1, math.ceil(share / case.stripe_gbit_per_s)))
    back = recovery(case)
    own, most = (_choice(case, count) for count in (now, max(now, fill)))
    carries = own.busy <= BUSY_MAX and own.overlap_needed <= max(OVERLAP_MAX, most.overlap_needed)
    enough = carries and back["global_model_s"] + back["state_s"] <= back["state_limit_s"]
    return now if enough else max(now, fill)


def _choice(case: Case, stripes: int) -> ScheduleChoice:
    return ScheduleChoice(case, case.rounds(), case.usable_gbit_per_s(stripes))


def choose(case: Case, stripes: int) -> ScheduleChoice:
    """Choose the first candidate that fits.

    If none fits, choose one with nearly the shortest overlap; if all overload the link, the one that fills it least.
    """
    tried = []
    for there in _candidates(case):
        tried.append(_choice(there, stripes))
        if tried[-1].fits:
            return tried[-1]
    carried = [each for each in tried if each.busy <= BUSY_MAX]
    if not carried:
        return min(tried, key=lambda each: each.busy)
    least = min(each.overlap_needed for each in carried)
    # One more step is accepted, because latency alone may need it.
    return next(each for each in carried if each.overlap_needed <= least + 1)


def _candidates(case: Case) -> Iterator[Case]:
    protocol, wire = case.config.protocol, case.config.wire
    # The queue must hold all fragments, because a joining learner gets them at once.
    pieces_max = case.config.transport.queue_payloads_max
    narrower = FORMATS[max(FORMATS.index(wire.up), FORMATS.index(wire.down)) :]
    formats = dict.fromkeys([(wire.up, wire.down), *zip(narrower, narrower, strict=True)])
    for schedule in _schedules(protocol, pieces_max):
        try:
            there = changed(case, protocol={**schedule, "overlap_steps": max(1, protocol.overlap_steps)})
        except ValueError:
            # The model cannot be cut into this number of fragments.
            continue
        for up, down in formats:
            yield changed(there, wire={"up": up, "down": down})


def _schedules(protocol: ProtocolConfig, pieces_max: int) -> Iterator[dict[str, Any]]:
    """Yield H and P of the config, then longer and longer periods; periods of classes keep their proportions."""
    factor, longest = 1, max(phase.cycle for phase in protocol.groups.phases)
    while not isinstance(protocol.sync_every, int) or protocol.sync_later:
        later = {step: _times(periods, factor) for step, periods in protocol.sync_later.items()}
        yield {"sync_every": _times(protocol.sync_every, factor), "sync_later": later}
        factor *= 2
        if longest * factor > SYNC_EVERY_MAX:
            return
    sync_every = protocol.sync_every
    while True:
        own = min(protocol.num_fragments, sync_every)
        for fragments in dict.fromkeys((own, min(sync_every, pieces_max))):
            yield {"sync_every": sync_every, "num_fragments": fragments}
        if sync_every >= SYNC_EVERY_MAX:
            return
        sync_every = min(2 * sync_every, SYNC_EVERY_MAX)


def _times(periods: Periods, factor: int) -> Periods:
    return periods * factor if isinstance(periods, int) else {name: h * factor for name, h in periods.items()}


def _entry(setting: str, value: object, now: object, why: str) -> Advice:
    return {"setting": setting, "value": value, "now": now, "change": value != now, "why": why}


def _turns(case: Case, choice: ScheduleChoice) -> list[Advice]:
    """Advise on H, P, tau and the formats."""
    protocol, wire = case.config.protocol, case.config.wire
    there, formats, rounds, rate = choice.case.config.protocol, choice.case.config.wire, choice.rounds, choice.rate
    overlap = min(max(choice.overlap_needed, OVERLAP_MIN), OVERLAP_STEPS_MAX)
    carries = f"each island moves {rounds.planned_gbit_per_s:.3g} of {rate:.3g} Gbit/s on average"
    if choice.busy <= BUSY_MAX:
        why_h = (
            f"{carries}, {choice.busy:.0%}, with every fragment once per {rounds.sync_every} steps "
            f"({rounds.sync_every * case.step_s:.3g} s){' or more often' * there.by_class}; a smaller H means less "
            "drift, so it is raised only if necessary"
        )
        if case.by_bucket:
            why_h += f"; through the bucket rounds follow each other after {rounds.pace_s(rate):.3g} s at the earliest"
    else:
        why_h = f"{carries}: {choice.busy:.0%}, more than {BUSY_MAX:.0%} even with the largest H that is tried"
    why_wire = f"{carries} in these formats" if formats == wire else _too_wide(case, rate)
    why_wire += "; int4 both ways with error feedback cost 0.2 % of the loss in our runs, int2 no more (docs/log.md)"
    return [
        _entry("protocol.sync_every", there.sync_every, protocol.sync_every, why_h),
        _entry("protocol.num_fragments", there.num_fragments, protocol.num_fragments, _why_fragments(choice)),
        _entry(
            "protocol.overlap_steps",
            max(overlap, protocol.overlap_steps),
            protocol.overlap_steps,
            _why_tau(case, choice),
        ),
        _wait(case, choice),
        _entry("wire.up", formats.up, wire.up, why_wire),
        _entry("wire.down", formats.down, wire.down, why_wire.replace(" moves ", " gets ", 1)),
    ]


def _too_wide(case: Case, rate: float) -> str:
    """Return the reason for narrower formats: how much of a link of `rate` Gbit/s the config's formats would fill."""
    own, wire = case.rounds(), case.config.wire
    return (
        f"{wire.up} up and {wire.down} down would fill {own.planned_gbit_per_s / rate:.0%} of {rate:.3g} Gbit/s on "
        f"average, or take {own.age_s(rate) / case.step_s:.2g} steps a round"
    )


def _why_fragments(choice: ScheduleChoice) -> str:
    rounds = choice.rounds
    if rounds.num_fragments == rounds.sync_every:
        return f"one fragment of at most {size(rounds.up_bytes)} goes up in every step, so the link is evenly filled"
    return (
        f"the largest of {len(choice.case.run.fragments)} fragments is {size(rounds.up_bytes)} and moves up and down "
        f"in {_travel_s(choice):.3g} s; more fragments are not needed"
    )


def _why_tau(case: Case, choice: ScheduleChoice) -> str:
    rounds, age_s = choice.rounds, choice.rounds.age_s(choice.rate)
    way_s = TRIPS * rounds.round_trip_s
    way = (
        f"{way_s:.3g} s for {HOPS} ways through the bucket"
        if case.by_bucket
        else f"{1e3 * way_s:.3g} ms for 1.5 round trips"
    )
    why = (
        f"over this link a version arrives {age_s:.3g} s after the copies that it merges (half a step for reports, "
        f"{way}, {rounds.merge_s:.2g} s to merge, "
        f"{_travel_s(choice):.2g} s up and down, {rounds.arrive_s:.2g} s to read on islands), which is "
        f"{age_s / case.step_s:.2g} steps of {case.step_s:.3g} s; at least {OVERLAP_MIN} leave room for the grace "
        "window"
    )
    if choice.overlap_needed > OVERLAP_MAX:
        why += (
            f"; more than {OVERLAP_MAX} costs quality (arXiv 2501.18512): make steps longer by larger batches, or "
            "bring the syncer nearer"
        )
    if case.config.protocol.lockstep:
        waits = 1 - case.rounds().utilisation(choice.rate)
        why += f"; with 0 islands wait for {waits:.1%} of the time, which is right for synchronous DiLoCo only"
    return why


def _wait(case: Case, choice: ScheduleChoice) -> Advice:
    """Advise on the wait for fragments: none if it would be in vain."""
    now = case.config.protocol.wait_steps
    found = wait(case, choice.rounds, choice.rate)
    needs_s, per_step = found["needs_s"], found["needs_s"] / case.step_s
    if not now:
        why = (
            f"an island that waits for each fragment adopts it before its next step, one or two steps earlier, and "
            f"each step with a fragment takes {needs_s:.3g} s longer over this link ({per_step:.0%}), "
            f"and more if islands differ; that needs {_above(per_step)}"
        )
        return _entry("protocol.wait_steps", now, now, why)
    if found["per_step_s"]:
        why = f"a fragment arrives {needs_s:.3g} s after the report, within the limit of {found['limit_s']:.3g} s"
        return _entry("protocol.wait_steps", now, now, why)
    why = (
        f"a fragment arrives {needs_s:.3g} s after the report, and the limit is {found['limit_s']:.3g} s, so islands "
        f"soon stop waiting; to have it before the next step needs {_above(per_step)}, and costs {per_step:.0%} of "
        "each step with a fragment"
    )
    return _entry("protocol.wait_steps", 0.0, now, why)


def _above(steps: float) -> str:
    """Return the wait that a fragment needs, in words."""
    if steps > WAIT_STEPS_MAX:
        return f"a wait of {steps:.2g} steps, more than wait_steps may be ({WAIT_STEPS_MAX:g})"
    return f"wait_steps above {steps:.2g}"


def _travel_s(choice: ScheduleChoice) -> float:
    """Return the seconds to move the largest fragment up and down."""
    return (choice.rounds.up_bytes + choice.rounds.down_bytes) / (choice.rate * GBIT)


def _stripes(case: Case, stripes: int) -> Advice:
    now, assumed, each = case.config.transport.stripes, case.assumed, case.stripe_gbit_per_s
    share = assumed.link_gbit_per_s / case.per_site
    if not assumed.round_trip_ms:
        return _entry("transport.stripes", stripes, now, "without a round trip one connection fills the link")
    why = (
        f"a window of {assumed.tcp_window_mb:.3g} MB per {assumed.round_trip_ms:.3g} ms lets one connection move about "
        f"{each:.3g} Gbit/s (two thirds of the window, measured), and each island has {share:.3g} Gbit/s"
    )
    if stripes * each < share and stripes == STRIPES_MAX:
        why += f"; {STRIPES_MAX} is the most, so raise net.ipv4.tcp_rmem and tcp_wmem too, and say --tcp-window-mb"
    elif stripes * each < share and stripes == now:
        why += f"; {now} carry rounds and recoveries"
    return _entry("transport.stripes", stripes, now, why)


def _rate(choice: ScheduleChoice) -> list[Advice]:
    """Tell which rate of data parallel the config's learning rate belongs to; nothing for a user's own optimizer."""
    config = choice.case.config
    if config.optimizer.module:
        return []
    adapters = config.model.lora.rank > 0
    now, factor = config.optimizer.learning_rate, rate_factor(config.merge, config.protocol, adapters=adapters)
    of = " of the whole model" if adapters else ""
    why = (
        f"a rate that is tuned for data parallel{of} with as many samples per global step becomes about {factor:.2g} "
        f"times as high for {'adapters on ' * adapters}islands with merge.method {config.merge.method} and these "
        f"periods, so {now:g} is right where data parallel{of} has {now / factor:.2g}; "
    )
    if adapters:
        why += (
            f"of this, a factor of {OF_ADAPTERS:g} is for adapters (Schulman et al. 2025, LoRA Without Regret), and "
            "the rule for islands was measured without them"
        )
    else:
        why += f"our best rates were within a factor of {OFF_BY:g} of this rule"
    base, names = config.islands.base, config.islands.names
    if base != names:
        few, many = (sum(config.island(name).batch_size for name in each) for each in (base, names))
        why += (
            f"; with {len(base)} to {len(names)} islands a global step has {few} to {many} sequences, so tune data "
            "parallel with the number that most of the run will have"
        )
    return [_entry("optimizer.learning_rate", now, now, why) | {"change": None}]


def _budget(case: Case) -> list[Advice]:
    """Advise a budget in tokens if the number of islands may change."""
    config, steps = case.config, case.config.train.steps
    base, names = config.islands.base, config.islands.names
    if base == names or config.train.tokens or config.model.own:
        return []
    why = (
        f"with {len(base)} of {len(names)} islands {steps} global steps train on fewer tokens; a budget of tokens ends "
        "the run, and moves its learning-rate schedule, by what all islands have trained"
    )
    tokens = _entry("train.tokens", steps * config.budget.step_tokens, 0, why)
    return [tokens, _entry("train.steps", 0, steps, "train.tokens ends the run")]


def _others(choice: ScheduleChoice, stripes: int) -> list[Advice]:
    """Advise on payloads and recoveries, but only if a setting must change."""
    there = changed(choice.case, transport={"stripes": stripes})
    config, age_s = there.config, choice.rounds.age_s(choice.rate)
    found: list[Advice] = []
    if age_s > config.protocol.pull_timeout_s:
        wait = float(math.ceil(2 * age_s))
        why = f"a version takes {age_s:.3g} s, and a round waits for an island's value for at most this setting"
        found.append(_entry("protocol.pull_timeout_s", wait, config.protocol.pull_timeout_s, why))
    whole = 4 * max(each.num_elements for each in there.run.fragments)
    if whole > config.transport.payload_bytes_max:
        most = 1 << math.ceil(math.log2(whole))
        why = f"a joining island gets whole fragments in float32, and the largest has {size(whole)}"
        found.append(_entry("transport.payload_bytes_max", most, config.transport.payload_bytes_max, why))
    back = recovery(there)
    if back["state_bytes"] and not back["state_arrives"]:
        why = (
            f"a neighbour's state of {back['state_bytes'] / 1e9:.3g} GB takes {back['state_s']:.3g} s beside rounds, "
            f"but a transfer may take protocol.recovery_turns x H steps, {back['state_limit_s']:.3g} s: it would "
            "fail, and a returning island whose own state is lost would start with new moments of the inner "
            "optimizer; wire.states int8 makes the state smaller"
        )
        now = config.protocol.recovery_turns
        turns = math.ceil(RECOVERY_ROOM * now * back["state_s"] / back["state_limit_s"])
        found.append(_entry("protocol.recovery_turns", min(turns, RECOVERY_TURNS_MAX), now, why))
    return found
