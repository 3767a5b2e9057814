"""The faults of a chaos run; they are drawn from a seed before the run, so that they can be printed and repeated.

A fault is due at a global step instead of a time, so that a schedule does not depend on a machine's speed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.tools.chaos.relay import Direction
from diloco_jax.transport.link import bucket_scheme

KINDS = (
    # An island gets SIGKILL.
    "kill",
    # An island gets SIGSTOP, and SIGCONT later.
    "stop",
    # The syncer gets these signals.
    "kill-syncer",
    "stop-syncer",
    # An island's connections end with RST or FIN.
    "cut",
    # An island's link silently forwards nothing.
    "black-hole",
    # An island's link is slow.
    "slow-link",
    # An island's link inverts bytes.
    "corrupt",
    # An island's link repeats bytes.
    "duplicate",
    # An island sends values that are NaN or huge.
    "nan",
    # The syncer cannot extend its files.
    "full-disk",
    # An island gets SIGKILL, and then the donor that it recovers from.
    "kill-donor",
)
# Faults of one slice of an island of several, whose others train on.
SLICE_KINDS = (
    # The slice gets SIGKILL.
    "kill-slice",
    # The slice gets SIGSTOP, and SIGCONT later.
    "stop-slice",
)
# No recovery is needed from these faults, but alarms must report them. They are used only with --kinds.
SIGNS = (
    # An island is stopped for most of the time.
    "slow",
    # An island reports NaN as its loss.
    "bad-loss",
    # An island reports wrong times.
    "wrong-clock",
    # A file replaces the folder of snapshots.
    "block-snapshots",
    # A file fills a small disk (at most BALLAST_BYTES_MAX free) with the run's folder.
    "low-disk",
    # The syncer's certificate is replaced by one that is valid for a day.
    "old-certificate",
)
# These faults need a relay between an island and the syncer, which a bucket leaves no place for.
LINK_KINDS = ("cut", "black-hole", "slow-link", "corrupt", "duplicate", "kill-donor")
SYNCER_KINDS = {"kill-syncer", "stop-syncer", "full-disk", "block-snapshots", "low-disk", "old-certificate"}
# Alarms are checked every two seconds, and an island must be slow for ten seconds.
SIGN_S = 20.0
# Faults are due between these shares of the run's global steps, so that the run can recover from the last ones.
FIRST, LAST = 0.05, 0.9
FAULTS_MAX = 10_000
# One island returns, one sends it a state, and one stays well.
LEAST_FOR_DONOR = 3
# A multiple of the usual numbers of slices.
SLICES = 840


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosFault:
    """One fault of the schedule."""

    # Faults are numbered from 1 in the order of `at_step`.
    number: int
    # One of KINDS or SIGNS.
    kind: str
    # An island or the syncer.
    target: str
    # The global step when the fault is due. It waits while its target has not recovered from an earlier fault.
    at_step: int
    # The time until the fault is undone; 0 for a momentary fault.
    duration_s: float = 0.0
    # The affected direction of the link: towards the syncer, from it, or both.
    direction: Direction = "both"
    # cut: rst or fin. nan: nan or huge.
    how: str = ""
    # corrupt: distance of inverted bytes. duplicate: bytes. nan: values. slow-link: bytes per second. wrong-clock:
    # seconds. kill-slice, stop-slice: number of the slice, modulo their count.
    amount: int = 0

    @property
    def kills(self) -> bool:
        """Return whether the target returns as another process."""
        return self.kind.startswith("kill") and self.kind not in SLICE_KINDS

    def __str__(self) -> str:
        details = {
            "nan": f", next {self.amount} values {self.how}",
            "cut": f" with {self.how.upper()}",
            "corrupt": f" {self.direction}, one byte in {self.amount}",
            "duplicate": f" {self.direction}, bytes: {self.amount}",
            "slow-link": f" to {self.amount} bytes/s",
            "black-hole": f" {self.direction}",
            "wrong-clock": f" by {self.amount} s",
            "kill-slice": f", slice {self.amount}",
            "stop-slice": f", slice {self.amount}",
        }
        words = f"#{self.number} step {self.at_step}: {self.kind} {self.target}{details.get(self.kind, '')}"
        return words + (f", for {self.duration_s:.1f} s" if self.duration_s else "")


def possible_kinds(
    address: str, given: Sequence[str] = (), slices: int = 1, islands: int = LEAST_FOR_DONOR
) -> Sequence[str]:
    """Return the kinds of faults to draw: those that are given, else all that the run allows.

    Args:
        address: of the syncer; no relay can stand before a bucket.
        given: from the command line.
        slices: of each island.
        islands: their number.

    Raises:
        ValueError: A given kind needs something that this run does not have.
    """
    kinds = [*KINDS, *SLICE_KINDS]
    if bucket_scheme(address):
        if wrong := [kind for kind in given if kind in LINK_KINDS]:
            raise ValueError(
                f"--kinds has {', '.join(wrong)}, faults of a relay, and transport.address {address} is a bucket, "
                "which no relay can stand before; choose kills and pauses, such as kill,stop,kill-syncer,stop-syncer"
            )
        kinds = [kind for kind in kinds if kind not in LINK_KINDS]
    unfit: tuple[str, ...] = SLICE_KINDS if slices == 1 else ()
    if wrong := [kind for kind in given if kind in unfit]:
        raise ValueError(
            f"--kinds has {', '.join(wrong)}, and an island has one slice (islands.slices); leave it out, or raise "
            "islands.slices"
        )
    if islands < LEAST_FOR_DONOR:
        unfit = (*unfit, "kill-donor")
    return given or [kind for kind in kinds if kind not in unfit]


def draw_schedule(
    seed: int, islands: Sequence[str], *, faults: int, steps: int, silence_s: float, kinds: Sequence[str] = KINDS
) -> tuple[ChaosFault, ...]:
    """Draw faults that are spread evenly over kinds, islands and the run; ValueError for wrong numbers or kinds."""
    known = (*KINDS, *SLICE_KINDS, *SIGNS)
    unknown = sorted(set(kinds) - {*known})
    if unknown or not kinds:
        raise ValueError(f"kinds of faults: {', '.join(unknown) or 'none'}; choose from {', '.join(known)}")
    if not 1 <= faults <= FAULTS_MAX:
        raise ValueError(f"{faults} faults; use 1 to {FAULTS_MAX}")
    if len(islands) < 2 or ("kill-donor" in kinds and len(islands) < LEAST_FOR_DONOR):
        raise ValueError(f"{len(islands)} islands; use at least 2, and 3 for kill-donor, because one must stay well")
    random = Random(seed)
    kind_deck, island_deck = deck(random, kinds), deck(random, islands)
    width = (LAST - FIRST) * steps / faults
    schedule = []
    for index in range(faults):
        kind = next(kind_deck)
        target = SYNCER if kind in SYNCER_KINDS else next(island_deck)
        at_step = int(FIRST * steps + (index + random.random()) * width)
        details = draw_details(random, kind, silence_s)
        schedule.append(ChaosFault(number=index + 1, kind=kind, target=target, at_step=at_step, **details))
    return tuple(schedule)


def deck(random: Random, cards: Sequence[str]) -> Iterator[str]:
    """Yield all cards in random order, then reshuffle them, without end."""
    while True:
        yield from random.sample(cards, len(cards))


def draw_details(random: Random, kind: str, silence_s: float) -> dict[str, Any]:
    """Draw the fields of a fault that depend on its kind; an empty dict for kinds without such fields."""

    def around_the_lease() -> float:
        # Half of these durations are longer than the lease.
        return round(random.choice((random.uniform(0.2, 0.9), random.uniform(1.1, 2.0))) * silence_s, 3)

    def way() -> str:
        return random.choice(("up", "down", "both"))

    match kind:
        case "stop" | "stop-syncer":
            return {"duration_s": around_the_lease()}
        case "kill-slice":
            return {"amount": random.randrange(SLICES)}
        case "stop-slice":
            return {"duration_s": around_the_lease(), "amount": random.randrange(SLICES)}
        case "black-hole":
            return {"duration_s": around_the_lease(), "direction": way()}
        case "cut":
            return {"how": random.choice(("rst", "fin"))}
        case "slow-link":
            duration_s = round(random.uniform(2.0, 12.0), 3)
            return {"duration_s": duration_s, "amount": random.choice((2_000, 20_000, 200_000))}
        case "corrupt":
            return {"direction": way(), "amount": random.choice((1, 100, 5_000, 50_000))}
        case "duplicate":
            return {"direction": way(), "amount": random.choice((1, 9, 1_000, 50_000))}
        case "nan":
            return {"how": random.choice(("nan", "huge")), "amount": random.choice((1, 2, 12))}
        case "full-disk":
            return {"duration_s": round(random.uniform(1.0, 4.0), 3)}
        case "wrong-clock":
            return {"duration_s": SIGN_S, "amount": random.choice((-3600, -30, 30, 3600))}
        case "slow" | "bad-loss" | "block-snapshots" | "low-disk" | "old-certificate":
            return {"duration_s": SIGN_S}
    return {}
