"""Requests and delays of a run through a bucket, and their price.

A session has a stream of objects in each direction, whose names the reader computes. Its writer puts an object when it
has a message, but at most one per poll. Its reader requests the next object after every object, and once per poll while
there is none. A request for an object that is not there counts, too. A payload is a separate object.

What an island says: a report after each step, a heartbeat between steps, and the value of each round. What the syncer
says: a pull and a version for each round, and the number of each global step that has no round. Further hosts of an
island only send their part of a value, and get their part of a version.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco_jax.runtime.syncer.copies import FILES, SNAPSHOT_LOOK_S
from diloco_jax.runtime.syncer.leading import LOOK_S
from diloco_jax.transport.bucket.session import OWED_MAX, RIDE_POLLS
from diloco_jax.transport.link import bucket_scheme
from diloco_jax.transport.store.store import PIECE_BYTES
from diloco_jax.transport.store.term import BEAT_S

DAY_S = 86400.0
# From a report to its version: the pull, the value and the version each pass the bucket once.
HOPS = 3
# The value and the version have payloads, each of them written before its message and read after it.
PAYLOAD_HOPS = 2
# Bytes of an object beside payloads: a batch with one report, and its seal. Measured, tests/tools/plan/test_bucket.py.
OBJECT_BYTES = 150
# The syncer reads once per poll. If one island is the last of two rounds, the version of the first and the pull of the
# second share an object with the probability poll / round. This is the share of such rounds. It depends on the phases
# of the polls: in three runs with two and four islands, rounds of 1.1 s and a poll of 0.5 s, 24 %, 46 % and 57 % of the
# pulls shared an object.
SAME_LAST = 0.5
# Inputs of a round whose effects leave the syncer: the report that closes it, the last value, and the merge. Each of
# them, and each global step without a round, is copied for a standby before.
COPIED = 3
# Bytes of one of them with the reports before it, sealed. Measured with two islands.
COPIED_BYTES = 450


class RequestPrices(NamedTuple):
    """Prices in dollars of 1,000 requests. Deletions are free, and a read of what is not there costs a read."""

    # PUT, POST and LIST.
    write: float
    # GET and HEAD.
    read: float
    source: str


# Standard storage in one region of the United States; other regions and classes cost more.
PRICES = {
    "s3": RequestPrices(0.005, 0.0004, "aws.amazon.com/s3/pricing, us-east-1, November 2026"),
    "gs": RequestPrices(0.005, 0.0004, "cloud.google.com/storage/pricing, us-east1, November 2026"),
    "az": RequestPrices(0.005, 0.0004, "azure.microsoft.com/pricing/details/storage/blobs, hot, LRS, November 2026"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTraffic:
    """Messages and payloads that a run's processes exchange through a bucket."""

    # Settings transport.poll_s, transport.keepalive_s and protocol.heartbeat_s.
    poll_s: float
    keepalive_s: float
    heartbeat_s: float
    # The time of one request.
    request_s: float
    islands: int
    # Hosts of an island, each with a session.
    hosts: int = 1
    # The time of an inner step; an island reports after each step.
    step_s: float
    # The mean time between two rounds that are made, and the global steps without a round for each of them.
    round_s: float
    idle_steps: float = 0.0
    # Encoded sizes of the payloads of a round: one for each round of a cycle.
    up_bytes: Sequence[float]
    down_bytes: Sequence[float]
    # Objects of each version: one for all learners of one host, and one for each host of each other kind of island.
    versions: int = 1
    # The time between two snapshots and the bytes of one, which a standby gets; None without a standby.
    copied: "CopiedSnapshots | None" = None


class CopiedSnapshots(NamedTuple):
    """The snapshots that the syncer copies for a standby."""

    # 0: there are none.
    every_s: float
    size: float


class RequestCounts(NamedTuple):
    """Requests of one process per day, and the bytes that it writes and reads."""

    puts: float = 0.0
    # Objects that were there, and objects that were not.
    gets: float = 0.0
    misses: float = 0.0
    lists: float = 0.0
    deletes: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0

    def plus(self, other: "RequestCounts", times: float = 1.0) -> "RequestCounts":
        """Return the sum with `times` times another count."""
        return RequestCounts(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    def price(self, prices: RequestPrices) -> float:
        """Return the price of the requests in dollars."""
        return ((self.puts + self.lists) * prices.write + (self.gets + self.misses) * prices.read) / 1000


def requests(traffic: BucketTraffic) -> tuple[RequestCounts, RequestCounts]:
    """Return the requests of an island, and of the syncer, per day."""
    hosts, islands, rounds = traffic.hosts, traffic.islands, 1 / traffic.round_s
    reports = 1 / traffic.step_s
    together = SAME_LAST * min(1.0, traffic.poll_s * rounds)
    said_up, said_down = reports + 1 / traffic.heartbeat_s + rounds, (2 - together + traffic.idle_steps) * rounds
    # A version has been delivered to an island, and no message answers it. The syncer answers a value with a version.
    leader = _objects_per_s(traffic, said_up, said_down, rounds), _objects_per_s(traffic, said_down, said_up)
    further = _objects_per_s(traffic, rounds, rounds, rounds), _objects_per_s(traffic, rounds, rounds)
    value, version = _payload(traffic.up_bytes, hosts), _payload(traffic.down_bytes, hosts)
    island, syncer = RequestCounts(), RequestCounts()
    for (up, down), count in ((leader, 1), (further, hosts - 1)):
        island = island.plus(_side(traffic, up, down), count)
        syncer = syncer.plus(_side(traffic, down, up), count * islands)
    island = island.plus(_written(value), hosts * rounds).plus(_read(version), hosts * rounds)
    syncer = syncer.plus(_read(value), hosts * islands * rounds).plus(_written(version), traffic.versions * rounds)
    # It looks for new sessions once per poll, gives a sign of life, and sees whether it still leads.
    syncer = syncer.plus(RequestCounts(lists=1 / (traffic.poll_s + traffic.request_s)))
    syncer = syncer.plus(RequestCounts(puts=1, gets=1, lists=1), 1 / BEAT_S)
    if traffic.copied is not None:
        syncer = syncer.plus(_copies(traffic, traffic.copied))
    return RequestCounts().plus(island, DAY_S), RequestCounts().plus(syncer, DAY_S)


def standby_requests(traffic: BucketTraffic) -> RequestCounts:
    """Return the requests per day of a standby that waits for its turn; none without one."""
    if traffic.copied is None:
        return RequestCounts()
    every_s, size = traffic.copied
    batches = _batches_per_s(traffic)
    # It looks for the leader, its sign of life and whether its copy is complete, and lists the tape's new objects.
    look = RequestCounts(lists=2, gets=3)
    looks = max(0.0, 1 - batches * traffic.request_s) / (LOOK_S + (look.lists + look.gets) * traffic.request_s)
    found = RequestCounts(gets=batches, received_bytes=COPIED_BYTES * batches).plus(look, looks)
    # A listing ends with an empty page, if it is not empty itself.
    found = found.plus(RequestCounts(lists=2 if every_s else 1), 1 / SNAPSHOT_LOOK_S)
    if every_s:
        fetched = RequestCounts(gets=math.ceil(size / PIECE_BYTES) + 1, received_bytes=size)
        found = found.plus(fetched, 1 / max(every_s, SNAPSHOT_LOOK_S))
    return RequestCounts().plus(found, DAY_S)


def _batches_per_s(traffic: BucketTraffic) -> float:
    """Return how often the syncer copies inputs: before their effects leave."""
    return (COPIED + traffic.idle_steps) / traffic.round_s


def _copies(traffic: BucketTraffic, copied: CopiedSnapshots) -> RequestCounts:
    """Return the requests per second of a syncer that keeps a copy of its tape and snapshots."""
    # It writes inputs, and looks whether a later process leads.
    found = RequestCounts().plus(RequestCounts(puts=1, lists=1, sent_bytes=COPIED_BYTES), _batches_per_s(traffic))
    if not copied.every_s:
        return found
    pieces = math.ceil(copied.size / PIECE_BYTES)
    snapshot = RequestCounts(puts=pieces + 1 + len(FILES), lists=2, deletes=pieces + 1, sent_bytes=copied.size)
    return found.plus(snapshot, 1 / copied.every_s)


def _objects_per_s(traffic: BucketTraffic, said: float, heard: float, delivered: float = 0.0) -> float:
    """Return the objects per second of a writer that says something `said` times per second, at equal distances.

    Args:
        heard: How often the other side says something.
        delivered: How often it delivers a payload without saying something soon.
    """
    most, late_s = 1 / (traffic.poll_s + traffic.request_s), traffic.request_s
    talk, heard = min(said, most), min(heard, most)
    # What it has read fills no object unless there is much of it, and what it has delivered unless it is quiet.
    answers = min(heard / OWED_MAX, _gaps(talk, OWED_MAX / heard + late_s))
    answers = max(answers, min(delivered, _gaps(talk, RIDE_POLLS * traffic.poll_s + late_s)))
    return talk + answers + _gaps(talk + answers, traffic.keepalive_s / 2 + late_s)


def _gaps(rate: float, quiet_s: float) -> float:
    """Return how many more objects per second it takes so that none comes later than `quiet_s` after the last."""
    if not rate:
        return 1 / quiet_s
    # Rounded, because a gap of exactly `quiet_s` needs none.
    return rate * (math.ceil(round(1 / (rate * quiet_s), 9)) - 1)


def _side(traffic: BucketTraffic, written: float, read: float) -> RequestCounts:
    """Return the requests per second of one end of a session, without payloads."""
    misses = max(0.0, 1 - read * traffic.request_s) / (traffic.poll_s + traffic.request_s)
    return RequestCounts(written, read, misses, 0.0, written, OBJECT_BYTES * written, OBJECT_BYTES * read)


class _Payload(NamedTuple):
    """Means of a round's payload on one host."""

    size: float
    puts: float
    gets: float


def _payload(sizes: Sequence[float], hosts: int) -> _Payload:
    """Average over the payloads of a cycle, with their pieces: two more requests begin and end an upload of several."""
    pieces = [math.ceil(size / hosts / PIECE_BYTES) for size in sizes]
    puts = [each + 2 if each > 1 else 1 for each in pieces]
    return _Payload(sum(sizes) / hosts / len(sizes), sum(puts) / len(sizes), sum(pieces) / len(sizes))


def _written(payload: _Payload) -> RequestCounts:
    return RequestCounts(puts=payload.puts, deletes=1, sent_bytes=payload.size)


def _read(payload: _Payload) -> RequestCounts:
    return RequestCounts(gets=payload.gets, received_bytes=payload.size)


def hop_s(poll_s: float, request_s: float) -> float:
    """Return the mean seconds of a message through a bucket, as a mean over a round's hops, without its bytes' time.

    A writer that has just written waits for the rest of a poll, half a poll on average, and the reader again. A message
    and a payload each need a request on both sides.
    """
    return poll_s + (2 + 2 * PAYLOAD_HOPS / HOPS) * request_s


def poll_for(hop: float, request_s: float) -> float:
    """Return the poll interval that a hop of these seconds leaves; at most 0 if there is none."""
    return hop - hop_s(0.0, request_s)


def request_figures(address: str, traffic: BucketTraffic) -> dict[str, Any]:
    """Return counts and their price per day, as `diloco plan --json` prints them; the price is None if unknown."""
    prices = PRICES.get(bucket_scheme(address))
    island, syncer = requests(traffic)
    standby = standby_requests(traffic)
    total = syncer.plus(island, traffic.islands).plus(standby)
    return {
        "address": address,
        "poll_s": traffic.poll_s,
        "hop_s": hop_s(traffic.poll_s, traffic.request_s),
        "island": island._asdict(),
        "syncer": syncer._asdict(),
        "standby": standby._asdict() if traffic.copied is not None else None,
        "requests_per_day": total.puts + total.gets + total.misses + total.lists,
        "price_per_day": total.price(prices) if prices else None,
        "price_source": prices.source if prices else None,
    }
