"""The model of requests to a bucket, against a simulation of writers and readers, and its place in `diloco plan`."""

import json
from dataclasses import replace
from typing import Any

import pytest

from diloco_jax.cli import main as cli
from diloco_jax.protocol import messages
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.plan.advice import advise
from diloco_jax.tools.plan.bucket import (
    COPIED_BYTES,
    DAY_S,
    HOPS,
    OBJECT_BYTES,
    PRICES,
    BucketTraffic,
    CopiedSnapshots,
    RequestCounts,
    hop_s,
    request_figures,
    requests,
    standby_requests,
)
from diloco_jax.tools.plan.forecast import bucket_traffic, forecast
from diloco_jax.tools.plan.report import describe
from diloco_jax.transport import wire
from diloco_jax.transport.bucket.stream import control_entry
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.store.seal import SEAL_BYTES
from tests.tools.plan.test_forecast import small

pytestmark = pytest.mark.usefixtures("few_failures")

TRAFFIC = BucketTraffic(
    poll_s=1.0,
    keepalive_s=20.0,
    heartbeat_s=4.0,
    request_s=0.0,
    islands=3,
    step_s=2.0,
    round_s=8.0,
    up_bytes=[1000],
    down_bytes=[2000],
)
PIECE = 8 << 20


def written_and_missed(said: float, heard: float, poll_s: float, keepalive_s: float, request_s: float) -> list[float]:
    """Simulate a writer and its reader: objects and looks in vain per second.

    Args:
        said, heard: Messages per second of this side and of the other, at equal distances.
    """
    span_s, tick_s, now_s = 2000.0, 1 / 16, 0.0
    free_s, written_s, told, objects, known = 0.0, -1e9, 0.0, 0, 0
    ready = []
    while now_s < span_s:
        waits = int(now_s * said) > told
        since_s = now_s - written_s
        owes = int(now_s * min(heard, 1 / (poll_s + request_s))) - known >= 16
        due = (waits and since_s >= poll_s) or owes or since_s >= keepalive_s / 2
        if now_s >= free_s and due:
            told, free_s = int(now_s * said), now_s + request_s
            known = int(now_s * min(heard, 1 / (poll_s + request_s)))
            written_s, objects = free_s, objects + 1
            ready.append(free_s)
        now_s += tick_s
    look_s, read, misses = 0.0, 0, 0
    while look_s < span_s:
        there = read < len(ready) and ready[read] <= look_s
        read, misses = read + there, misses + (not there)
        look_s += request_s + (0.0 if there else poll_s)
    return [objects / span_s, misses / span_s]


@pytest.mark.parametrize(
    ("step_s", "round_s", "poll_s", "keepalive_s", "request_s"),
    [
        # Every message has a separate object.
        (2.0, 8.0, 1.0, 20.0, 0.0),
        (8.0, 8.0, 1.0, 1000.0, 0.0),
        # Several messages share an object.
        (0.25, 2.0, 1.0, 20.0, 0.0),
        (0.25, 2.0, 0.5, 20.0, 0.25),
        # The syncer says what it has read after 16 objects.
        (2.0, 256.0, 1.0, 200.0, 0.0),
        # Nobody says anything for long.
        (64.0, 1e9, 0.25, 16.0, 0.0),
        (4.0, 32.0, 1.0, 20.0, 0.125),
    ],
)
def test_objects_and_looks_are_those_of_a_simulation(
    step_s: float, round_s: float, poll_s: float, keepalive_s: float, request_s: float
) -> None:
    traffic = replace(
        TRAFFIC,
        poll_s=poll_s,
        keepalive_s=keepalive_s,
        heartbeat_s=4 * step_s,
        request_s=request_s,
        step_s=step_s,
        round_s=round_s,
        islands=1,
    )
    island, syncer = requests(traffic)
    up, down = 1.25 / step_s + 1 / round_s, (2 - 0.5 * min(1.0, poll_s / round_s)) / round_s
    for said, heard, writer, reader, others in (
        (up, down, island, syncer, 1 / (poll_s + request_s) + 2 / 5.0),
        (down, up, syncer, island, 0.0),
    ):
        objects, misses = written_and_missed(said, heard, poll_s, keepalive_s, request_s)
        # Each side also writes the payloads of its rounds, and the syncer its signs of life.
        beats = 1 / 5.0 if writer is syncer else 0.0
        assert writer.puts / DAY_S - 1 / round_s - beats == pytest.approx(objects, rel=0.02)
        assert reader.misses / DAY_S == pytest.approx(misses, rel=0.02)
        assert reader.lists / DAY_S == pytest.approx(others - (1 / 5.0 if others else 0.0))


def test_counts_of_a_run_by_hand() -> None:
    """Reports every 2 s, heartbeats every 4 s and values every 8 s; the syncer says 2 things in 8 s, and idle steps.

    In half of the cases one island is the last of two rounds, and in an eighth of these they share a poll.
    """
    island, syncer = requests(replace(TRAFFIC, idle_steps=1.0))
    up, down, rounds = 7 / 8 * DAY_S, (3 - 1 / 16) / 8 * DAY_S, DAY_S / 8
    assert island == RequestCounts(
        puts=up + rounds,
        gets=down + rounds,
        misses=DAY_S,
        lists=0.0,
        deletes=up + rounds,
        sent_bytes=OBJECT_BYTES * up + 1000 * rounds,
        received_bytes=OBJECT_BYTES * down + 2000 * rounds,
    )
    # One version for all three islands, a look at the entrance per second, and a sign of life every 5 s.
    assert syncer == pytest.approx(
        RequestCounts(
            puts=3 * down + rounds + DAY_S / 5,
            gets=3 * up + 3 * rounds + DAY_S / 5,
            misses=3 * DAY_S,
            lists=DAY_S + DAY_S / 5,
            deletes=3 * down + rounds,
            sent_bytes=3 * OBJECT_BYTES * down + 2000 * rounds,
            received_bytes=3 * OBJECT_BYTES * up + 3000 * rounds,
        )
    )


def test_large_payloads_are_written_and_read_in_pieces() -> None:
    large = replace(TRAFFIC, up_bytes=[PIECE, 2 * PIECE + 1], down_bytes=[2 * PIECE])
    (island, syncer), (few_island, few_syncer) = requests(large), requests(TRAFFIC)
    rounds = DAY_S / 8
    # A value has one request, or three for its pieces and two around them: three on average instead of one.
    assert island.puts - few_island.puts == pytest.approx(2 * rounds)
    assert syncer.gets - few_syncer.gets == pytest.approx(3 * rounds)
    assert island.gets - few_island.gets == pytest.approx(rounds)
    assert syncer.puts - few_syncer.puts == pytest.approx(3 * rounds)


def test_every_host_has_a_session_and_its_part_of_a_payload() -> None:
    """Only the first host reports. A further one writes a value, and that it has a version, once per round."""
    (one, _), (four, syncer) = requests(TRAFFIC), requests(replace(TRAFFIC, hosts=4, versions=4))
    assert four.puts - one.puts == pytest.approx(3 * (2 + 1) / 8 * DAY_S) and four.misses == 4 * one.misses
    assert four.sent_bytes - one.sent_bytes == pytest.approx(3 * 2 / 8 * DAY_S * OBJECT_BYTES)
    # Two messages for each leader, one for each further host, and one payload for the equal hosts of all islands.
    assert syncer.puts == pytest.approx((3 * (2 - 1 / 16) / 8 + 9 / 8 + 4 / 8 + 1 / 5) * DAY_S)


def test_a_standby_costs_two_requests_for_each_input_with_effects_and_reads_what_is_copied() -> None:
    """Rounds of 8 s copy three inputs, and a snapshot of two pieces every 40 s."""
    assert standby_requests(TRAFFIC) == RequestCounts()
    kept = replace(TRAFFIC, copied=CopiedSnapshots(40.0, PIECE + 1.0))
    (_, alone), (_, syncer), standby = requests(TRAFFIC), requests(kept), standby_requests(kept)
    batches = 3 / 8 * DAY_S
    more = [now - before for now, before in zip(syncer, alone, strict=True)]
    assert RequestCounts(*more) == pytest.approx(
        RequestCounts(
            # Pieces, the manifest and two small files.
            puts=batches + 5 / 40 * DAY_S,
            lists=batches + 2 / 40 * DAY_S,
            deletes=3 / 40 * DAY_S,
            sent_bytes=COPIED_BYTES * batches + (PIECE + 1) / 40 * DAY_S,
        ),
        abs=1e-3,
    )
    assert standby == pytest.approx(
        RequestCounts(
            gets=batches + 3 * DAY_S + 3 / 40 * DAY_S,
            lists=2 * DAY_S + 2 / 15 * DAY_S,
            received_bytes=COPIED_BYTES * batches + (PIECE + 1) / 40 * DAY_S,
        )
    )
    figures = request_figures("file:///shared/run", kept)
    assert figures["standby"] == standby._asdict() and request_figures("file:///x", TRAFFIC)["standby"] is None
    assert figures["requests_per_day"] > request_figures("file:///x", TRAFFIC)["requests_per_day"] + standby.gets


def test_the_bytes_of_an_object_are_those_of_a_report() -> None:
    held = tuple(messages.Adopted(3000, 1) for _ in range(12))
    report = messages.StepReport("island-3", 1796005105545, 3000, 10**9, 2990, held, 0.512, 2.7123, 24000, 24400)
    batch = pb.Batch(read=1000, fetched=300, entries=[control_entry(wire.pack_body(report))])
    assert len(batch.SerializeToString()) + SEAL_BYTES == pytest.approx(OBJECT_BYTES, rel=0.1)


def test_the_price_is_that_of_writes_and_reads() -> None:
    found = request_figures("s3://runs/x", TRAFFIC)
    island, syncer = requests(TRAFFIC)
    writes = 3 * island.puts + syncer.puts + syncer.lists
    reads = 3 * (island.gets + island.misses) + syncer.gets + syncer.misses
    assert found["requests_per_day"] == pytest.approx(writes + reads)
    assert found["price_per_day"] == pytest.approx(writes * 5e-6 + reads * 4e-7)
    assert {*PRICES} == {"s3", "gs", "az"} and "2026" in found["price_source"]
    assert request_figures("file:///shared/run", TRAFFIC)["price_per_day"] is None


def through(address: str, given: Assumptions | None = None, **changes: Any) -> Any:
    assumed = Assumptions(step_s=1.0, round_trip_ms=30.0) if given is None else given
    return small(transport={"address": address, **changes.pop("transport", {})}, given=assumed, **changes)


def test_a_round_passes_a_bucket_three_times() -> None:
    case = through("gs://runs/x")
    # A poll per hop; two requests per message, and two more for each of the two payloads of a round.
    assert HOPS * hop_s(1.0, 0.03) == pytest.approx(3.0 + 10 * 0.03)
    rounds = case.rounds()
    bytes_s = (rounds.up_bytes + rounds.down_bytes) * 8e-9 / case.usable_gbit_per_s()
    age_s = 0.5 + 3.3 + rounds.merge_s + rounds.arrive_s + bytes_s
    assert rounds.age_s(case.usable_gbit_per_s()) == pytest.approx(age_s)
    traffic = bucket_traffic(case)
    assert (traffic.islands, traffic.step_s, traffic.idle_steps, traffic.versions) == (4, 1.0, 1.0, 1)
    # Rounds are due every 2 s, and follow each other when 90 % of the time has passed that brings a version back.
    read_s = 2 * hop_s(1.0, 0.03) + rounds.arrive_s + rounds.down_bytes * 8e-9 / case.usable_gbit_per_s()
    assert rounds.due_s == 2.0 and traffic.round_s == pytest.approx(read_s / 0.9)
    assert sum(traffic.up_bytes) == rounds.up_total_bytes and len(traffic.down_bytes) == rounds.num_fragments
    # A piece of 8 MiB and a request take turns.
    piece_s = PIECE * 8e-9 / (5.0 * 0.92) + 0.03
    assert case.usable_gbit_per_s(stripes=1) == case.usable_gbit_per_s() == pytest.approx(PIECE * 8e-9 / piece_s)


def test_a_shorter_poll_is_advised_if_rounds_take_too_long() -> None:
    settings = {"protocol": {"sync_every": 60, "num_fragments": 4, "overlap_steps": 2, "quorum": 1}}
    case = through("s3://runs/x", Assumptions(step_s=0.25), **settings)
    advice = {each["setting"]: each for each in advise(case)}
    assert "transport.stripes" not in advice
    poll, tau = advice["transport.poll_s"], advice["protocol.overlap_steps"]
    assert poll["change"] and poll["value"] < 0.3 and tau["value"] == 5 and "dollars" in poll["why"]
    assert "3 ways through the bucket" in tau["why"]
    # What it advises is enough.
    there = through(
        "s3://runs/x",
        Assumptions(step_s=0.25),
        protocol={**settings["protocol"], "overlap_steps": 5},
        transport={"poll_s": poll["value"]},
    )
    result = forecast(there, advise(there))
    assert result["verdict"]["link_enough"] and not result["verdict"]["change"]
    slow = {each["setting"]: each for each in advise(through("s3://runs/x", Assumptions(step_s=4.0), **settings))}
    assert not slow["transport.poll_s"]["change"] and slow["protocol.overlap_steps"]["value"] == 2


def test_rounds_are_made_rarer_than_they_can_follow_each_other() -> None:
    settings = {"protocol": {"sync_every": 8, "num_fragments": 8, "overlap_steps": 2, "quorum": 1}}
    case = through("s3://runs/x", **settings)
    advice = {each["setting"]: each["value"] for each in advise(case)}
    there = through(
        "s3://runs/x",
        protocol={**settings["protocol"], "sync_every": advice["protocol.sync_every"], "overlap_steps": 5},
    )
    rate = there.usable_gbit_per_s()
    assert advice["protocol.sync_every"] > 8 and there.rounds().due_s >= 0.95 * there.rounds().pace_s(rate)


def test_plan_prints_the_requests_and_tau_for_each_poll_interval(capsys: pytest.CaptureFixture[str]) -> None:
    case = through("s3://runs/x")
    result = forecast(case, advise(case))
    text = describe(result)
    assert "poll interval, s" in text and "round trip, ms" not in text
    (own,) = [row for row in result["latency"] if row["given"]]
    assert own["poll_s"] == 1.0 and own["overlap_steps"] == 4
    island = result["bucket"]["island"]
    assert f"each island: {island['puts']:,.0f} writes and listings, " in text
    assert f"{result['bucket']['price_per_day']:,.2f} dollars (aws.amazon.com" in text
    assert forecast(small(), [])["bucket"] is None
    words = ["plan", "quickstart", "--transport.address", "file:///shared/run", "--step-s", "1", "--json"]
    assert cli.main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bucket"]["price_per_day"] is None and printed["bucket"]["requests_per_day"] > 0
