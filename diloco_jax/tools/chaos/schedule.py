"""The faults of a chaos run, drawn from a seed before it begins, so that they can be printed and repeated.

A fault waits for a global step rather than a time: two machines of different speed get the same schedule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.tools.chaos.relay import Direction

KINDS = (
    "kill",  # SIGKILL an island
    "stop",  # SIGSTOP an island, SIGCONT later
    "kill-syncer",
    "stop-syncer",
    "cut",  # end an island's connections, with RST or FIN
    "black-hole",  # nothing gets through an island's link, nobody is told
    "slow-link",
    "corrupt",  # invert bytes on an island's link
    "duplicate",  # repeat bytes on an island's link
    "nan",  # an island sends values that are NaN or huge
    "full-disk",  # the syncer cannot make its files longer
    "kill-donor",  # SIGKILL an island, and then the one that it recovers from
)
SIGNS = (  # nobody has to recover from these: alarms must tell of them; only with --kinds
    "slow",  # an island is stopped for most of the time
    "bad-loss",  # an island reports losses that are NaN
    "wrong-clock",  # the clock that an island tells is off
    "block-snapshots",  # the folder of the snapshots is gone, and a file in its place
    "low-disk",  # a file fills a small disk (of at most BALLAST_BYTES_MAX free) that holds the run's folder
    "old-certificate",  # the syncer's certificate is signed anew for a day
)
SYNCER_KINDS = {"kill-syncer", "stop-syncer", "full-disk", "block-snapshots", "low-disk", "old-certificate"}
SIGN_S = 20.0  # alarms look every two seconds, and an island must be slow for ten of them
FIRST, LAST = 0.05, 0.9  # share of the run's global steps in which faults happen: the last ones must heal in time
FAULTS_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosFault:
    """One fault of the schedule."""

    number: int  # from 1, in the order in which they are due
    kind: str  # one of KINDS or SIGNS
    target: str  # an island, or the syncer
    # The global step of the run at which it is due. It waits while its target has not recovered from another.
    at_step: int
    duration_s: float = 0.0  # until it is taken back; 0 for what is over at once
    direction: Direction = "both"  # of the link: towards the syncer, from it, or both
    how: str = ""  # cut: rst or fin. nan: nan or huge.
    # corrupt: one byte in so many. duplicate: bytes. nan: values. slow-link: bytes per second. wrong-clock: seconds.
    amount: int = 0

    @property
    def kills(self) -> bool:
        """Tell if its target comes back as another process."""
        return self.kind.startswith("kill")

    def __str__(self) -> str:
        details = {
            "nan": f", next {self.amount} values {self.how}",
            "cut": f" with {self.how.upper()}",
            "corrupt": f" {self.direction}, one byte in {self.amount}",
            "duplicate": f" {self.direction}, bytes: {self.amount}",
            "slow-link": f" to {self.amount} bytes/s",
            "black-hole": f" {self.direction}",
            "wrong-clock": f" by {self.amount} s",
        }
        words = f"#{self.number} step {self.at_step}: {self.kind} {self.target}{details.get(self.kind, '')}"
        return words + (f", for {self.duration_s:.1f} s" if self.duration_s else "")


def draw_schedule(
    seed: int, islands: Sequence[str], *, faults: int, steps: int, lease_s: float, kinds: Sequence[str] = KINDS
) -> tuple[ChaosFault, ...]:
    """Draw faults, spread evenly over kinds, islands and the run; ValueError for a number or kind that cannot be."""
    unknown = sorted(set(kinds) - {*KINDS, *SIGNS})
    if unknown or not kinds:
        raise ValueError(f"kinds of faults: {', '.join(unknown) or 'none'}; choose from {', '.join((*KINDS, *SIGNS))}")
    if not 1 <= faults <= FAULTS_MAX:
        raise ValueError(f"{faults} faults; use 1 to {FAULTS_MAX}")
    if len(islands) < 2 or ("kill-donor" in kinds and len(islands) < 3):
        raise ValueError(f"{len(islands)} islands; use at least 2, and 3 for kill-donor: one must live through it all")
    random = Random(seed)
    kind_deck, island_deck = deck(random, kinds), deck(random, islands)
    width = (LAST - FIRST) * steps / faults
    schedule = []
    for index in range(faults):
        kind = next(kind_deck)
        target = SYNCER if kind in SYNCER_KINDS else next(island_deck)
        at_step = int(FIRST * steps + (index + random.random()) * width)
        details = draw_details(random, kind, lease_s)
        schedule.append(ChaosFault(number=index + 1, kind=kind, target=target, at_step=at_step, **details))
    return tuple(schedule)


def deck(random: Random, cards: Sequence[str]) -> Iterator[str]:
    """Yield cards in random order, again and again; each comes as often as any other."""
    while True:
        yield from random.sample(cards, len(cards))


def draw_details(random: Random, kind: str, lease_s: float) -> dict[str, Any]:
    """Draw the fields of a fault that depend on its kind; empty for a kind that has none."""

    def around_the_lease() -> float:  # half of them outlast it
        return round(random.choice((random.uniform(0.2, 0.9), random.uniform(1.1, 2.0))) * lease_s, 3)

    def way() -> str:
        return random.choice(("up", "down", "both"))

    match kind:
        case "stop" | "stop-syncer":
            return {"duration_s": around_the_lease()}
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
