"""Requests and delays of a run through a bucket, and their price.

A session has a stream of objects in each direction, whose names the reader computes. Its writer puts an object when it
has a message, but at most one per poll. Its reader requests the next object after every object, and once per poll while
there is none. A request for an object that is not there counts, too. A payload is a separate object.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco_jax.transport.link import bucket_scheme
from diloco_jax.transport.store.store import PIECE_BYTES
from diloco_jax.transport.store.term import BEAT_S

DAY_S = 86400.0
# A writer that has nothing to say but has read something says that after so many polls.
ANSWER_POLLS = 4
# From a report to its version: the pull, the value and the version each pass the bucket once.
HOPS = 3
# The value and the version have payloads, each of them written before its message and read after it.
PAYLOAD_HOPS = 2
# Bytes of an object beside payloads: a batch with one report, and its seal. Measured, tests/tools/plan/test_bucket.py.
OBJECT_BYTES = 150


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

    # Settings transport.poll_s and transport.keepalive_s.
    poll_s: float
    keepalive_s: float
    # The time of one request.
    request_s: float
    islands: int
    # Hosts of an island, each with a session.
    hosts: int = 1
    # The time of an inner step; an island reports after each step.
    step_s: float
    # The mean time between two rounds.
    due_s: float
    # Encoded sizes of the payloads of a round: one for each round of a cycle.
    up_bytes: Sequence[float]
    down_bytes: Sequence[float]


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
    hosts, islands = traffic.hosts, traffic.islands
    # A report after each step, and the value of each round; a pull and a version for each round.
    said_up, said_down = 1 / traffic.step_s + 1 / traffic.due_s, 2 / traffic.due_s
    up, down = _objects_per_s(traffic, said_up, said_down), _objects_per_s(traffic, said_down, said_up)
    rounds = 1 / traffic.due_s
    value, version = _payload(traffic.up_bytes, hosts), _payload(traffic.down_bytes, hosts)
    # The leaders of all islands read the same object. Other hosts get their own part.
    versions = 1 if hosts == 1 else hosts * islands
    island = _sides(traffic, up, down).plus(_written(value), hosts * rounds).plus(_read(version), hosts * rounds)
    syncer = _sides(traffic, down, up).plus(_read(value), hosts * rounds)
    syncer = RequestCounts().plus(syncer, islands).plus(_written(version), versions * rounds)
    # It looks for new sessions once per poll, gives a sign of life, and sees whether it still leads.
    syncer = syncer.plus(RequestCounts(lists=1 / (traffic.poll_s + traffic.request_s)))
    syncer = syncer.plus(RequestCounts(puts=1, gets=1, lists=1), 1 / BEAT_S)
    return RequestCounts().plus(island, DAY_S), RequestCounts().plus(syncer, DAY_S)


def _objects_per_s(traffic: BucketTraffic, said: float, heard: float) -> float:
    """Return the objects per second of a writer that says something `said` times per second, at equal distances.

    Args:
        heard: How often the other side says something.
    """
    most = 1 / (traffic.poll_s + traffic.request_s)
    talk, heard = min(said, most), min(heard, most)
    answers = min(heard, _gaps(talk, ANSWER_POLLS * traffic.poll_s + traffic.request_s))
    return talk + answers + _gaps(talk + answers, traffic.keepalive_s / 2 + traffic.request_s)


def _gaps(rate: float, quiet_s: float) -> float:
    """Return how many more objects per second it takes so that none comes later than `quiet_s` after the last."""
    if not rate:
        return 1 / quiet_s
    # Rounded, because a gap of exactly `quiet_s` needs none.
    return rate * (math.ceil(round(1 / (rate * quiet_s), 9)) - 1)


def _sides(traffic: BucketTraffic, written: float, read: float) -> RequestCounts:
    """Return the requests per second of one end of an island's sessions, without payloads."""
    misses = max(0.0, 1 - read * traffic.request_s) / (traffic.poll_s + traffic.request_s)
    one = RequestCounts(written, read, misses, 0.0, written, OBJECT_BYTES * written, OBJECT_BYTES * read)
    return RequestCounts().plus(one, traffic.hosts)


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
    total = syncer.plus(island, traffic.islands)
    return {
        "address": address,
        "poll_s": traffic.poll_s,
        "hop_s": hop_s(traffic.poll_s, traffic.request_s),
        "island": island._asdict(),
        "syncer": syncer._asdict(),
        "requests_per_day": total.puts + total.gets + total.misses + total.lists,
        "price_per_day": total.price(prices) if prices else None,
        "price_source": prices.source if prices else None,
    }
