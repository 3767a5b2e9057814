"""The bytes per second of an island's link, against sums that are written out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol.watch.stats import KEPT_PER_STEP
from diloco_jax.runtime.records.earlier import NOTHING_EARLIER, Earlier
from diloco_jax.runtime.syncer.island_traffic import IslandTraffic
from diloco_jax.runtime.syncer.watch import Watch
from diloco_jax.transport.link import Traffic, TransportConfig
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.inbox import Inbox, Session
from tests.protocol.syncer_inputs import running


def rate(traffic: IslandTraffic, up: int, down: int, now_s: float, step_s: float | None = 2.0) -> Any:
    return traffic.rates({"a": Traffic(up, down)}, {"a": step_s}, now_s).get("a")


def per_s(up: float, down: float) -> dict[str, float]:
    return {"up_bytes_per_s": round(up, 1), "down_bytes_per_s": round(down, 1)}


def test_a_rate_is_a_mean_in_which_a_step_ago_counts_nine_tenths() -> None:
    traffic = IslandTraffic({})
    assert rate(traffic, 1000, 2000, 5.0) is None, "nothing is known of the time before"
    assert rate(traffic, 1600, 2000, 7.0) == per_s(300, 0)
    # Steps take 2 s, so the first interval of 2 s is one step ago.
    assert rate(traffic, 1600, 2100, 9.0) == per_s(0.9 * 600 / (0.9 * 2 + 2), 100 / (0.9 * 2 + 2))
    # No time has passed, and the bytes count at the next look.
    assert rate(traffic, 1700, 2100, 9.0) == per_s(0.9 * 600 / 3.8, 100 / 3.8)
    kept = KEPT_PER_STEP**0.5
    expected = (kept * 0.9 * 600 + 100) / (kept * 3.8 + 1), kept * 100 / (kept * 3.8 + 1)
    assert rate(traffic, 1700, 2100, 10.0) == per_s(*expected)


@pytest.mark.parametrize("step_s", [None, 0.0, 0.01, 1.0])
def test_short_steps_count_as_a_second_and_so_does_an_island_that_made_none(step_s: float | None) -> None:
    traffic = IslandTraffic({})
    rate(traffic, 0, 0, 0.0, step_s)
    rate(traffic, 0, 800, 1.0, step_s)
    assert rate(traffic, 100, 800, 2.0, step_s) == per_s(100 / 1.9, 0.9 * 800 / 1.9)


def test_an_island_without_a_link_has_no_rate_and_starts_afresh() -> None:
    traffic, link = IslandTraffic({}), {"a": 1.0}
    counted = [{"a": Traffic(n, 0)} for n in (0, 900, 900, 910)]
    traffic.rates(counted[0], link, 0.0)
    assert traffic.rates(counted[1], link, 1.0) == {"a": per_s(900, 0)}
    assert traffic.rates(counted[1], {}, 1.0) == traffic.rates(counted[2], {}, 2.0) == {}
    assert traffic.rates(counted[3], link, 4.0) == {"a": per_s(5, 0)}


INTERVALS = st.lists(st.tuples(st.floats(0.1, 100.0), st.integers(0, 10**9)), min_size=1, max_size=20)


@given(INTERVALS, st.floats(0.0, 100.0))
def test_a_rate_is_between_the_least_and_the_greatest_of_its_intervals(
    intervals: list[tuple[float, int]], step_s: float
) -> None:
    traffic, now_s, moved = IslandTraffic({}), 0.0, 0
    rate(traffic, 0, 0, now_s, step_s)
    seen = []
    for elapsed_s, size in intervals:
        now_s, moved = now_s + elapsed_s, moved + size
        seen.append(size / elapsed_s)
        found = rate(traffic, moved, 0, now_s, step_s)["up_bytes_per_s"]
        assert min(seen) * 0.999 - 0.1 <= found <= max(seen) * 1.001 + 0.1


def test_totals_continue_those_of_earlier_processes() -> None:
    traffic = IslandTraffic({"a": {"up_bytes": 1000, "down_bytes": 0}})
    counted = {"a": Traffic(1, 2), "b": Traffic(3, 4), "nobody": Traffic(5, 6)}
    assert traffic.totals(counted, ("c", "b", "a")) == {
        "a": {"up_bytes": 1001, "down_bytes": 2},
        "b": {"up_bytes": 3, "down_bytes": 4},
        "c": {"up_bytes": 0, "down_bytes": 0},
    }


def test_the_islands_are_the_whole_wire(tmp_path: Path) -> None:
    """Over a wire without connections, and over two processes of the syncer."""
    inbox, machine = Inbox(), running("a", "b")
    context: Any = SimpleNamespace(run_dir=tmp_path, machine=machine)
    context.config = SimpleNamespace(name="run", trackers=(), callbacks=())
    others: Any = (lambda: (), SimpleNamespace(), SimpleNamespace(), SimpleNamespace())
    before = {"a": {"up_bytes": 100, "down_bytes": 10}, "b": {"up_bytes": 200, "down_bytes": 20}}
    earlier = Earlier({"up_bytes": 300, "down_bytes": 30}, None, by_island=before)
    watches = [Watch(context, each, *others) for each in (NOTHING_EARLIER, earlier)]
    for watch in watches:
        watch._listener = SimpleNamespace(traffic_of_learners=inbox.traffic_of_learners)  # type: ignore[assignment]
        assert watch._rates(1.0) == {}
    for name, host, up, down in (("a", 0, 4, 1), ("a", 1, 2, 3), ("b", 0, 0, 8)):
        Session(inbox, pb.Header(sender=name, host=host), name, TransportConfig()).count(up, down)
    assert watches[0].wire() == {
        "up_bytes": 6,
        "down_bytes": 12,
        "by_island": {"a": {"up_bytes": 6, "down_bytes": 4}, "b": {"up_bytes": 0, "down_bytes": 8}},
    }
    for watch in watches:
        wire = watch.wire()
        for way in ("up_bytes", "down_bytes"):
            assert wire[way] == sum(moved[way] for moved in wire["by_island"].values())
        assert watch._rates(3.0) == {"a": per_s(3, 2), "b": per_s(0, 4)}
