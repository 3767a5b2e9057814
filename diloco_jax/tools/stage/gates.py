"""The gates of a stage: what to measure before a run gets more sites, and the bar for a config with M islands.

Every bar is computed from the forecast of `diloco plan`, or from the published law of loss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diloco_jax.settings.islands import IslandOverride
from diloco_jax.settings.run import RunConfig
from diloco_jax.sim.goodput.bandwidth import STEP_TIMES_MAX
from diloco_jax.tools.budget.figures import size
from diloco_jax.tools.plan.case import BUSY_MAX, PAYLOAD_SHARE, Case
from diloco_jax.tools.plan.forecast import recovery
from diloco_jax.tools.plan.growth import syncer_rates
from diloco_jax.tools.plan.law import distance
from diloco_jax.tools.plan.slices import needed_gbit_per_s, worst
from diloco_jax.tools.plan.verdict import MADE_MIN

# The last number of sites of each stage: 2 to 3, 4 to 6, 8 and more.
STAGE_ENDS = (3, 6)
# The next stage after each of them is forecast with so many sites; later stages double.
NEXT = (6, 8)
# Headers and control messages may add this share to payloads; they added 4 to 9 %.
EXTRA = 0.10
# The distance of published losses from their own law.
LAW_NOISE = 0.002
# Losses are compared if the global steps, of as many samples each, differ by at most this share.
STEPS_APART = 0.05
SYNCER = "HOST:PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGate:
    """A figure that must reach its bar before the run gets more sites."""

    name: str
    # What the figure is, in words.
    about: str
    # The bar in words.
    bar: str
    # The command that measures the figure.
    command: str
    # Returns the measured figure in words and whether it reaches the bar, from facts of a run; None if they lack it.
    judge: Callable[["RunFigures"], tuple[str, bool] | None]
    # The same for a figure that the user has measured and given as an option.
    given: tuple[str, bool] | None = None


class RunFigures(NamedTuple):
    """The figures of a run, finished or not."""

    # As `diloco status --json` prints it.
    status: dict[str, Any]
    # Violations that `diloco audit` found; None if it did not run.
    violations: int | None
    # Evaluation loss and global steps of a data-parallel run; None without such a run.
    baseline: tuple[float, int] | None

    @property
    def learners(self) -> list[dict[str, Any]]:
        return list(self.status["learners"])


class StageRange(NamedTuple):
    """A range of sites."""

    number: int
    words: str
    # The next stage is forecast with so many sites.
    next_sites: int


def stage_of(sites: int) -> StageRange:
    """Return the stage of a number of sites."""
    first, second = STAGE_ENDS
    if sites <= first:
        return StageRange(1, f"2 to {first} sites", NEXT[0])
    if sites <= second:
        return StageRange(2, f"{first + 1} to {second} sites", NEXT[1])
    return StageRange(3, f"more than {second} sites", 2 * sites)


def with_sites(config: RunConfig, sites: int) -> RunConfig:
    """Return the config with another number of islands, each with the batch that it has now.

    Islands that the config does not have yet are like its first one.
    """
    islands, count = config.islands, config.islands.count
    if sites == count:
        return config
    first = islands.each.get(islands.names[0], IslandOverride())
    names = [f"island-{index}" for index in range(sites)]
    each = {
        name: islands.each.get(name, IslandOverride() if index < count else first) for index, name in enumerate(names)
    }
    share = islands.batch_size or config.train.batch_size // count
    sizes = [own.batch_size or share for own in each.values()]
    return replace(
        config,
        islands=replace(islands, count=sites, least=min(islands.least, sites), batch_size=share, each=each),
        train=replace(config.train, batch_size=sum(sizes)),
        protocol=replace(config.protocol, quorum=min(config.protocol.quorum, sites)),
    )


def gates(case: Case, word: str, run: str, goodput: float, *, link_given: bool) -> list[StageGate]:
    """Return the gates for a case; the ones that are measured first come first.

    Args:
        link_given: whether the rate of the islands' links is measured, and not a default.
        word: the config as the command line names it.
        run: the run's folder or host:port, as the commands name it.
        goodput: the share of time that islands are expected to train, failures included.
    """
    return [
        _link(case, word, given=link_given),
        _syncer(case, word),
        *([_slices(case)] if case.config.islands.slices > 1 else []),
        _rounds(run),
        _participation(case, run, goodput),
        _loss(case, word, run),
        _traffic(case, run),
        _return(run),
        StageGate(
            name="alarms",
            about="alarms that stand",
            bar="none",
            command=f"diloco status {run}",
            judge=lambda facts: _none_of([each["alarm"] for each in facts.status["alarms"]]),
        ),
        StageGate(
            name="audit",
            about="violations of the protocol's guarantees on the tapes",
            bar="none",
            command=f"diloco audit {run}",
            judge=lambda facts: None if facts.violations is None else (str(facts.violations), not facts.violations),
        ),
    ]


def _slices(case: Case) -> StageGate:
    """Return the gate of the network between the slices of an island."""
    needed, given = needed_gbit_per_s(worst(case)), case.assumed.slices_gbit_per_s
    return StageGate(
        name="slices",
        about="rate of each host's network to the other slices of its island",
        bar=f"at least {needed:.3g} Gbit/s each way, for steps of at most {STEP_TIMES_MAX:g} times their computation",
        command="iperf3 between the hosts of two slices, all at once   (give the least rate as --slices-gbit-per-s)",
        # A run does not show what this network could carry.
        judge=lambda facts: None,
        given=(f"{given:.3g} Gbit/s", given >= needed) if given else None,
    )


def _none_of(names: list[str]) -> tuple[str, bool]:
    return ", ".join(names) or "none", not names


def _link(case: Case, word: str, *, given: bool) -> StageGate:
    rounds, usable = case.rounds(), case.usable_gbit_per_s()
    rate = max(rounds.planned_gbit_per_s / BUSY_MAX, rounds.gbit_per_s(MADE_MIN))
    needs = f"at least {rate:.3g} Gbit/s each way" if math.isfinite(rate) else "no rate is enough with this round trip"
    return StageGate(
        name="link",
        about="payload rate between each island and the syncer",
        bar=f"{needs}, with a round trip of at most {case.assumed.round_trip_ms:g} ms",
        command=f"diloco doctor {word} --island island-0 --syncer {SYNCER}   (on each island's machine; give the least "
        "rate as --link-gbit-per-s, and --round-trip-ms)",
        # Only doctor measures what a link could carry.
        judge=lambda facts: None,
        given=(f"{usable:.3g} Gbit/s of payload over the given link", usable >= rate) if given else None,
    )


def _syncer(case: Case, word: str) -> StageGate:
    link = case.assumed.syncer_link_gbit_per_s
    need = syncer_rates(case).share(case.learners, PAYLOAD_SHARE * BUSY_MAX)

    def judge(facts: RunFigures) -> tuple[str, bool] | None:
        wire, seconds = facts.status["wire"], facts.status["wall_s"]
        if not (facts.status["global_step"] and seconds and link):
            return None
        moved = max(wire["up_bytes"], wire["down_bytes"]) * 8e-9 / seconds
        return f"{moved:.3g} Gbit/s on average of a link of {link:.3g}", moved <= BUSY_MAX * PAYLOAD_SHARE * link

    return StageGate(
        name="syncer",
        about=f"rate of the syncer's link, which carries {case.learners} times an island's traffic",
        bar=f"a link of at least {need:.3g} Gbit/s each way; rounds fill {BUSY_MAX:.0%} of that",
        command=f"diloco doctor {word} --listen   (on the syncer's machine, while doctor runs on all islands at once; "
        "give the sum of their rates as --syncer-link-gbit-per-s)",
        judge=judge,
        given=(f"the given link of {link:.3g} Gbit/s", link >= need) if link else None,
    )


def _rounds(run: str) -> StageGate:
    def judge(facts: RunFigures) -> tuple[str, bool] | None:
        most = max((each["local_step"] for each in facts.learners), default=0)
        if not most:
            return None
        made = facts.status["global_step"] / most
        return f"{made:.3f} ({facts.status['global_step']} global steps in {most} inner steps)", made >= MADE_MIN

    return StageGate(
        name="rounds",
        about="global steps per inner step of the fastest island",
        bar=f"at least {MADE_MIN:g}",
        command=f"diloco status {run}",
        judge=judge,
    )


def _participation(case: Case, run: str, goodput: float) -> StageGate:
    """Return the gate of the share of rounds that merge an island; a slow island has a report in fewer of them."""
    due_s = case.rounds().due_s
    bars = {
        name: MADE_MIN * goodput * min(1.0, due_s / kind.step_s)
        for kind in case.kinds
        for name in kind.outline.kind.names
    }
    least = min(bars.values())

    def judge(facts: RunFigures) -> tuple[str, bool] | None:
        shares = {each["learner"]: each["participation"] for each in facts.learners if each["local_step"]}
        if not shares:
            return None
        below = {name: share for name, share in shares.items() if share < bars.get(name, least)}
        shown = below or {name: share for name, share in shares.items() if share == min(shares.values())}
        return ", ".join(f"{name} {share:.2f}" for name, share in shown.items()), not below

    slow = [f"{name} {bar:.2f}" for name, bar in bars.items() if bar != max(bars.values())]
    return StageGate(
        name="participation",
        about="share of rounds that merged each island",
        bar=f"at least {max(bars.values()):.2f}" + (f"; slower islands less: {', '.join(slow)}" if slow else ""),
        command=f"diloco status {run}",
        judge=judge,
    )


def _loss(case: Case, word: str, run: str) -> StageGate:
    limit = max(0.0, distance(case.learners, case.parameters)) + LAW_NOISE

    def judge(facts: RunFigures) -> tuple[str, bool] | None:
        loss = facts.status["eval_loss"]
        if facts.baseline is None or loss is None:
            return None
        reference, steps = facts.baseline
        if abs(facts.status["global_step"] / max(1, steps) - 1) > STEPS_APART:
            return None
        above = loss / reference - 1
        return f"{above:+.1%} ({loss:.4f} against {reference:.4f})", above <= limit

    return StageGate(
        name="loss",
        about="evaluation loss above that of data parallel after as many global steps",
        bar=f"at most {limit:+.1%}: the published law for M = {case.learners} with its noise of {LAW_NOISE:.1%}",
        command=f"diloco train {word} --algorithm data_parallel --run-dir BASE; diloco report {run} --baseline BASE",
        judge=judge,
    )


def _traffic(case: Case, run: str) -> StageGate:
    per_step = case.kinds[0].outline.links.per_step
    rounds_bytes = (per_step["up_bytes_per_step"] + per_step["down_bytes_per_step"]) * (1 + EXTRA)
    joining = case.kinds[0].outline.links.joining_bytes * (1 + EXTRA)
    # A neighbour's state goes up to the syncer and down to the island that returns.
    returning = joining + 2 * recovery(case)["state_bytes"] * (1 + EXTRA)

    def judge(facts: RunFigures) -> tuple[str, bool] | None:
        wire, steps, many = facts.status["wire"], facts.status["global_step"], len(facts.learners)
        if not steps or not many:
            return None
        moved = wire["up_bytes"] + wire["down_bytes"]
        returns = sum(each["restarts"] for each in facts.learners)
        allowed = steps * many * rounds_bytes + many * joining + returns * returning
        return (
            f"{size(moved / steps / many)} ({moved / allowed:.0%} of the bar for {many} joins and {returns} returns)",
            moved <= allowed,
        )

    return StageGate(
        name="cost",
        about="bytes per global step and island, both ways, which is what traffic costs",
        bar=f"at most {size(rounds_bytes)}, and {size(joining)} for each join and {size(returning)} for each return",
        command=f"diloco status {run} --json   (wire)",
        judge=judge,
    )


def _return(run: str) -> StageGate:
    def judge(facts: RunFigures) -> tuple[str, bool] | None:
        if not facts.learners:
            return None
        restarts = sum(each["restarts"] for each in facts.learners)
        return f"{restarts} returns", restarts > 0

    return StageGate(
        name="return",
        about="islands that stopped and came back while the others trained",
        bar="at least 1",
        command=f"diloco drain island-0 {run}, then start the island again",
        judge=judge,
    )
