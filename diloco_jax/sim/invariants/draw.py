"""Settings, a network and faults of a simulated run, drawn at random from a seed."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.evaluations import NEVER, EvaluationPlan
from diloco_jax.protocol.turns import Periods
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.fault import ARMED, ARMED_S, Fault
from diloco_jax.sim.network import LinkFaults, NetworkOptions
from diloco_jax.sim.norms import SPREAD, NormEvent, NormSettings
from diloco_jax.sim.scenario import Scenario

LEARNERS_MAX = 8
# Kinds that random_faults draws, with their weights. Other kinds happen only if a scenario names them.
WEIGHTS = {
    "crash": 3,
    "disconnect": 3,
    "pause": 2,
    "slow": 2,
    "partition": 3,
    "corrupt": 2,
    "poison": 3,
    "donor_crash": 4,
    "syncer_crash": 4,
    "rewind": 2,
}
KINDS = tuple(WEIGHTS)
# Share of seeds with a learner that is hostile for a while.
HOSTILE_SHARE = 0.15
# Share of seeds with a learner whose answers to pulls are lost or late for a while.
OWED_SHARE = 0.2
# Share of these seeds whose learner is alone for a while.
ALONE_SHARE = 0.3
# Share of seeds whose syncer sees its deadlines late, so that several may have passed.
LATE_TICKS_SHARE = 0.25
# Share of seeds with learners that have separate corpora.
CORPORA_SHARE = 0.4
# Share of seeds with a learner that an operator bans for a while.
BAN_SHARE = 0.2
# Share of seeds whose fragments have different periods, or whose periods change during the run.
PERIODS_SHARE = 0.3
# Share of seeds whose learners have several slices, and lose some of them.
SLICES_SHARE = 0.25
# Share of faults of slices that take the leading one too.
LEADS_SHARE = 0.4
# Share of seeds whose learners may wait for fragments.
WAITS_SHARE = 0.3


def random_scenario(seed: int, *, hostile: bool = False) -> Scenario:
    """Draw a scenario with random settings and faults, the same for equal seeds; hostile: with a hostile learner."""
    random = Random(seed)
    learners = random.randint(1, LEARNERS_MAX)
    names = Scenario(learners=learners).names
    # Fewer than half of the learners join late.
    joining = names[learners - random.randint(0, max(0, learners - 1)) // 2 :]
    stayers = [name for name in names if name not in joining]
    # The first learner always stays.
    leaving = stayers[1:][: random.choice((0, 0, 1, 2))]
    config = _random_config(random, learners - len(leaving))
    # A separate generator leaves the draws of other seeds as they were.
    own = Random(f"periods of {seed}")
    config = _with_periods(own, config) if own.random() < PERIODS_SHARE else config
    own = Random(f"waits of {seed}")
    if own.random() < WAITS_SHARE and not config.lockstep:
        config = replace(config, wait_steps=own.choice((0.1, 0.5, 1.0, 3.0)))
    until_s = random.choice((10.0, 30.0, 60.0))
    faults = list(random_faults(random, names, random.choice((0, 1, 2, 4, 8, 12)), until_s))
    faults += [Fault(random.uniform(0.0, until_s), random.choice(("leave", "drain")), (name,)) for name in leaving]
    faults += [Fault(random.uniform(0.5, until_s), "join", (name,)) for name in joining]
    most_samples = random.choice((1, 1, 4, 8))
    drawn = Scenario(
        config=config,
        learners=learners,
        total_steps=random.choice((20, 50, 80)) + 2 * config.groups.gap_max,
        network=_random_network(random, until_s),
        faults=tuple(sorted(faults)),
        step_s=random.choice((0.5, 1.0, 2.0)),
        speed_spread=random.choice((0.0, 0.1, 1.0, 3.0)),
        step_noise=random.choice((0.0, 0.05, 0.5)),
        step_samples=(random.choice((1, most_samples)), most_samples),
        reads_ahead=random.random() < 0.7,
        merge_s=random.choice((0.0, 0.05, 0.8)),
        # A payload takes 0.1 s on the slowest link, so pulls do not time out by themselves.
        payload_bytes=random.choice((0, 1_000_000)),
        state_parts=random.randint(1, 6),
        load_s=random.choice((0.0, 0.1, 2.0)),
        save_s=random.choice((0.0, 0.2, 3.0)),
        bad_states=random.choice((0.0, 0.0, 0.3)),
        seed=seed,
    )
    delta_bytes = random.choice((None, drawn.payload_bytes // 8, drawn.payload_bytes // 8))
    drawn = replace(drawn, delta_bytes=delta_bytes, wake_s=random.choice((0.0, 0.0, 0.1, 0.5)))
    plan = EvaluationPlan(random.choice((0.0, 5.0, 20.0, 60.0)), random.choice((0, 1, 7, 20)))
    eval_s, bad_scores = random.choice((0.0, 0.5, 3.0, 30.0)), random.choice((0.0, 0.0, 0.3))
    drawn = replace(drawn, plan=plan if plan.wait_s else NEVER, eval_s=eval_s, bad_scores=bad_scores)
    # Share of the tokens of all steps; half of the runs have no budget.
    share = random.choice((0.0, random.uniform(0.1, 0.9)))
    drawn = replace(drawn, tokens=int(share * drawn.total_steps * drawn.budget.step_tokens))
    # A separate generator leaves the draws of other seeds as they were.
    own = Random(f"owed of {seed}")
    if own.random() < OWED_SHARE:
        at_s, late_s = own.uniform(0.0, 0.7 * until_s), own.choice((0.5, 2.0, 8.0))
        duration_s = own.uniform(0.3, 1.0) * (until_s - at_s)
        fault = Fault(at_s, own.choice(("mute", "late")), (own.choice(stayers),), duration_s, late_s)
        drawn = replace(drawn, faults=tuple(sorted((*drawn.faults, fault))))
        if own.random() < ALONE_SHARE and isinstance(config.sync_every, int) and not config.sync_later:
            drawn = _left_alone(own, drawn, fault)
    own = Random(f"late ticks of {seed}")
    if own.random() < LATE_TICKS_SHARE:
        drawn = replace(drawn, tick_late_s=own.choice((0.05, 0.5, 2.0)))
    own = Random(f"corpora of {seed}")
    if own.random() < CORPORA_SHARE:
        # Some learners share a corpus, some have their own, and some read the run's.
        drawn = replace(drawn, corpora=tuple(own.choices(("", "a", "b", "c"), k=learners)))
    drawn = _with_slices(drawn, until_s)
    others = [name for name in stayers[1:] if name not in leaving]
    return _with_people(drawn, others, until_s, hostile=hostile) if others else drawn


def _left_alone(own: Random, drawn: Scenario, owes: Fault) -> Scenario:
    """Let all learners crash but the one that owes answers: the rounds in flight are then asked of that one alone.

    There are as many fragments as rounds in flight, so that the round after them has a fragment of one of them.
    """
    count = own.randint(1, 3)
    at_s = owes.at_s + own.uniform(0.1, 0.6) * owes.duration_s
    others = [name for name in drawn.names if name not in owes.learners]
    crashes = [Fault(at_s, "crash", (name,), own.uniform(1.0, 8.0), notice_s=0.02) for name in others]
    faults = tuple(sorted((*drawn.faults, *crashes)))
    config = replace(drawn.config, sync_every=count, num_fragments=count, overlap_steps=count, quorum=1)
    return replace(drawn, config=config, faults=faults)


def _with_slices(drawn: Scenario, until_s: float) -> Scenario:
    """Give the learners of some scenarios several slices, and let some slices be lost for a while."""
    own = Random(f"slices of {drawn.seed}")
    if own.random() >= SLICES_SHARE:
        return drawn
    slices, faults = own.randint(2, 4), list(drawn.faults)
    for _ in range(own.randint(1, 5)):
        at_s, leads = own.uniform(0.0, 0.8 * until_s), own.random() < LEADS_SHARE
        duration_s = min(own.choice((1.0, 3.0, 40.0)), until_s - at_s)
        lost, notice_s = own.randint(1, slices), own.choice((0.02, 1.0, NEVER_S))
        who = (own.choice(drawn.names),)
        faults.append(Fault(at_s, "slice", who, duration_s, lost, notice_s, leads=leads))
    shrinks = own.random() < 0.5
    # The budget of tokens is for whole steps.
    tokens = drawn.tokens * slices
    return replace(drawn, slices=slices, shrinks=shrinks, tokens=tokens, faults=tuple(sorted(faults)))


def _with_people(drawn: Scenario, others: list[str], until_s: float, *, hostile: bool) -> Scenario:
    """Draw what people do to a scenario: an operator bans one of these learners, and one of them is hostile."""
    seed = drawn.seed
    own = Random(f"ban of {seed}")
    # Without the banned learner the others must meet the quorum, or no round closes while the ban lasts.
    if own.random() < BAN_SHARE and drawn.config.quorum <= len(others):
        at_s = own.uniform(0.0, 0.9 * until_s)
        fault = Fault(at_s, "ban", (own.choice(others),), own.uniform(0.1, 1.0) * (until_s - at_s))
        drawn = replace(drawn, faults=tuple(sorted((*drawn.faults, fault))))
    own = Random(f"hostile of {seed}")
    if not (own.random() < HOSTILE_SHARE or hostile):
        return drawn
    at_s = own.uniform(0.0, 0.7 * until_s)
    fault = Fault(at_s, "hostile", (own.choice(others),), own.uniform(0.3, 1.0) * (until_s - at_s))
    return replace(drawn, faults=tuple(sorted((*drawn.faults, fault))))


def with_norms(scenario: Scenario) -> Scenario:
    """Draw norms for the learners' values of a scenario, with learners that diverge, are damaged or are hostile.

    Half of the scenarios with one period get few fragments and many rounds, so that the rule remembers enough.
    """
    random, names, config = Random(f"norms of {scenario.seed}"), scenario.names, scenario.config
    if not config.by_class and not config.sync_later and random.random() < 0.5:
        config = replace(config, sync_every=random.choice((2, 4)), num_fragments=random.randint(1, 2))
        scenario = replace(scenario, config=config, total_steps=scenario.total_steps + 100)
    rate = random.choice((1e-5, 1e-4, 5e-3))
    # The norm of a fragment is 1, and one step of a lasting change must move it by less than that.
    louder = random.choice([factor for factor in (50.0, 110.0, 150.0, 1000.0) if SPREAD * factor * rate < 1.0])
    events = [_norm_event(random, random.choice(names)) for _ in range(random.choice((0, 1, 2, 3)))]
    if random.random() < 0.4:
        first, steps = random.randint(10, 60), random.choice((20, 200))
        events += [NormEvent(name, "louder", first, steps, louder) for name in random.choice((names, names[:1]))]
    if random.random() < 0.2:
        events.append(NormEvent(names[-1], "hostile", 1, 1))
    return replace(scenario, norms=NormSettings(rate=rate, events=tuple(events), ends_s=random.uniform(20.0, 200.0)))


def _norm_event(random: Random, name: str) -> NormEvent:
    first = random.randint(1, 60)
    return random.choice(
        (
            NormEvent(name, "damage", first, 1, 10.0 ** random.uniform(2.5, 44.0)),
            NormEvent(name, "nan", first, random.choice((1, 10))),
            NormEvent(name, "diverge", first, random.choice((20, 60)), random.choice((1.2, 2.0, 10.0))),
        )
    )


def _random_config(random: Random, stayers: int) -> ProtocolConfig:
    sync_every = random.choice((1, 2, 3, 4, 6, 8, 12, 24))
    silence_s = random.choice((4.0, 8.0, 15.0))
    return ProtocolConfig(
        sync_every=sync_every,
        num_fragments=random.randint(1, sync_every),
        overlap_steps=random.choice((0, 0, 1, 2, 2, 2, 3, 5)),
        quorum=random.randint(1, stayers) if random.random() < 0.6 else 1,
        grace_steps_max=random.choice((0.0, 0.5, 1.0, 1.0, 2.0)),
        ema_decay=random.choice((0.0, 0.5, 0.9)),
        silence_s=silence_s,
        heartbeat_s=silence_s / random.choice((2.0, 4.0)),
        resend_s=random.choice((0.3, 1.0, 2.0)),
        pull_timeout_s=random.choice((3.0, 10.0, 30.0)),
        anchor_history=random.choice((1, 2, 2, 4)),
        lease_ahead_steps=random.choice((2, 4, 8, 64)),
        release_s=random.choice((1.0, 5.0, 60.0)),
        snapshot_every=random.choice((0, 3, 5, 10, 10, 20)),
        restore_s=random.choice((2.0, 5.0, 15.0)),
        recover_from_peers=random.random() < 0.85,
        recovery_attempts=random.choice((1, 2, 3)),
        recovery_turns=random.choice((1, 1, 10)),
        strikes_max=random.choice((1, 2, 3)),
        unmerged_rounds_max=random.choice((5, 96)),
    )


def _with_periods(random: Random, config: ProtocolConfig) -> ProtocolConfig:
    """Draw periods by class, later ones, and fragments of each class, in place of one period."""
    names = ("mlp", "attention", "rest")[: random.randint(1, 3)]

    def drawn() -> Periods:
        periods, period = {}, config.overlap_steps + random.randint(1, 4)
        for name in random.sample(names, len(names)):
            periods[name], period = period, period * random.choice((2, 2, 3))
        return {name: periods[name] for name in names} if len(names) > 1 else period

    # Draw until every fragment of both phases has its own step.
    while True:
        counts = tuple(random.randint(1, 6) for _ in names)
        settings: dict[str, Any] = {"sync_every": drawn(), "num_fragments": sum(counts)}
        settings["class_fragments"] = counts if len(counts) > 1 else ()
        settings["sync_later"] = {random.randint(1, 60): drawn()} if random.random() < 0.5 else {}
        try:
            return replace(config, **settings)
        except ValueError:
            continue


def _random_network(random: Random, until_s: float) -> NetworkOptions:
    lossy = random.random() < 0.6
    return NetworkOptions(
        delay_s=random.choice((0.001, 0.01, 0.1, 0.6)),
        jitter_s=random.choice((0.0, 0.01, 0.3)),
        bandwidth_bytes_per_s=random.choice((0.0, 1e7, 1e9)),
        faults=LinkFaults(
            loss=random.uniform(0.0, 0.1) if lossy else 0.0,
            duplication=random.uniform(0.0, 0.1) if lossy else 0.0,
            reorder=random.uniform(0.0, 0.2) if lossy else 0.0,
            reorder_s=random.choice((0.05, 0.5, 5.0)),
            late=random.choice((0.0, 0.5)),
            heals_s=random.choice((0.0, until_s)) if lossy else 0.0,
        ),
    )


def random_faults(
    random: Random, learners: Sequence[str], count: int, until_s: float, kinds: Sequence[str] = KINDS
) -> tuple[Fault, ...]:
    """Draw faults that have all healed at `until_s`, sorted by time.

    Args:
        random: source of randomness.
        learners: whom they may hit.
        count: how many.
        until_s: end of the last one.
        kinds: which of KINDS may be drawn.
    """
    drawn = random.choices(kinds, [WEIGHTS[kind] for kind in kinds], k=count)
    return tuple(sorted(_draw(random, kind, learners, until_s) for kind in drawn))


def _draw(random: Random, kind: str, learners: Sequence[str], until_s: float) -> Fault:
    at_s = random.uniform(0.0, 0.8 * until_s)
    # mostly short ones that hide within a round, some that outlast lease and pull timeout
    left_s = max(0.0, until_s - at_s - (ARMED_S if kind in ARMED else 0.0))
    longest_s = (3.0, 40.0) if kind in ("corrupt", "poison") else (0.05, 0.5, 3.0, 40.0)
    duration_s = min(random.choice(longest_s) * random.uniform(0.2, 1.0), left_s)
    hit: Sequence[str]
    if kind in ("donor_crash", "syncer_crash"):
        hit = ()
    elif kind == "rewind":
        hit = random.sample(list(learners), random.randint(0, len(learners) // 2)) if random.random() < 0.3 else ()
    else:
        hit = random.sample(list(learners), random.randint(1, len(learners)) if kind == "partition" else 1)
    breaks = kind in ("crash", "disconnect", "donor_crash")
    return Fault(
        at_s,
        kind,
        tuple(sorted(hit)),
        duration_s,
        random.choice((2.0, 5.0, 20.0)) if kind == "slow" else 1.0,
        random.choice((0.02, 0.02, 1.0, NEVER_S)) if breaks else NEVER_S,
        breaks_snapshot=kind in ("syncer_crash", "rewind") and random.random() < 0.3,
    )
