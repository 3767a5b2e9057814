"""A chaos run: its schedule is a function of its seed, and a short one with real processes loses nothing."""

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from diloco_jax.cli import main as cli
from diloco_jax.runtime.records.tape_file import LineFile
from diloco_jax.runtime.records.telemetry import read_metrics, write_json
from diloco_jax.tools.chaos import learner
from diloco_jax.tools.chaos.actions import order_file
from diloco_jax.tools.chaos.learner import Orders, TimedLoop, chaos_learner
from diloco_jax.tools.chaos.schedule import (
    FIRST,
    KINDS,
    LAST,
    LINK_KINDS,
    SIGNS,
    SLICE_KINDS,
    SYNCER_KINDS,
    ChaosFault,
    draw_schedule,
    possible_kinds,
)
from diloco_jax.transport.trust import certificates
from tests.runtime.helpers import call, merged, processes_of, run, wait_for, write_config

pytestmark = pytest.mark.net

CHANGES = {
    "islands": {"devices": 1, "batch_size": 4},
    "protocol": {"silence_s": 2.0, "heartbeat_s": 0.5, "pull_timeout_s": 2.0, "resend_s": 0.5, "snapshot_every": 200},
    "transport": {"connect_timeout_s": 5.0, "keepalive_s": 2.0, "keepalive_timeout_s": 2.0},
}
# Two of these faults happen: a cut, which always fits, and then the kill.
QUICK = ("cut,corrupt,nan,stop,kill", 2, 1000, 5, 19)
ALL = ("kill,kill-syncer,kill-donor,stop-syncer,black-hole,duplicate,slow-link,full-disk", 3, 8000, 8, 3)


@pytest.mark.parametrize(
    ("kinds", "islands", "steps", "faults", "seed"),
    [pytest.param(*QUICK, marks=pytest.mark.long), pytest.param(*ALL, marks=pytest.mark.slow)],
)
def test_everything_comes_back(tmp_path: Path, kinds: str, islands: int, steps: int, faults: int, seed: int) -> None:
    config = write_config(tmp_path, **merged(CHANGES, {"train": {"steps": steps}, "islands": {"count": islands}}))
    words = ("--faults", faults, "--seed", seed, "--kinds", kinds, "--run-dir", tmp_path / "run", "--json")
    result = run("chaos", config, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["problems"] == []
    # A slow machine leaves no time for all faults.
    assert told["faults"] >= 1 and told["faults"] + told["skipped"] == faults
    assert told["recovered"] == told["recoveries"] >= told["faults"]
    samples = told["samples"]
    fates = sum(samples[fate] for fate in ("merged", "overwritten", "released", "out"))
    assert samples["leased"] == fates and not samples["violations"]
    assert told["participation"].keys() == {f"island-{index}" for index in range(islands)}
    assert processes_of(tmp_path / "run") == {}
    again = call("chaos", config, *words)
    assert again.returncode == 2 and "holds a run already" in again.stderr


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 300 MB at the folder, where this process may mount one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", folder], check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_every_alarm_is_shown_by_a_fault(tmp_path: Path) -> None:
    names = [f"island-{index}" for index in range(3)]
    certificates.make(tmp_path / "certs", names)
    encrypted = {"transport": certificates.settings(tmp_path / "certs")}
    often = {"train": {"steps": 16_000}, "islands": {"count": 3}, "protocol": {"snapshot_every": 50}}
    config = write_config(tmp_path, **merged(CHANGES, merged(encrypted, often)))
    kinds = {
        "kill": {"gone"},
        "stop": {"silent"},
        "nan": {"striking", "expelled"},
        "slow-link": {"link", "unmerged", "gone"},
    }
    kinds |= {"stop-syncer": {"outrun"}, "full-disk": {"tape"}, "slow": {"slow"}, "bad-loss": {"loss"}}
    kinds |= {"wrong-clock": {"clock"}, "block-snapshots": {"snapshot"}, "old-certificate": {"certificate"}}
    with small_disk(tmp_path / "disk") as mounted:
        kinds |= {"low-disk": {"disk"}} if mounted else {}
        asked: dict[str, Any] = {"faults": len(kinds), "steps": 16_000, "silence_s": 2.0}
        targets = [(each.kind, each.target) for each in draw_schedule(1604, names, **asked, kinds=[*kinds])]
        words = ("--faults", len(kinds), "--seed", 1604, "--kinds", ",".join(kinds), "--json")
        result = run("chaos", config, *words, "--run-dir", tmp_path / "disk" / "run")
        records = list(read_metrics(tmp_path / "disk" / "run" / "metrics.jsonl"))
        summary = json.loads((tmp_path / "disk" / "run" / "summary.json").read_text())
    begins = [record for record in records if record["kind"] == "alarm" and record["state"] == "begins"]
    begun = {record["alarm"] for record in begins}
    of = {kind: {record["alarm"] for record in begins if record["members"] in ([], [name])} for kind, name in targets}
    assert {fault: alarms for fault, alarms in kinds.items() if not alarms & of[fault]} == {}, result.stderr
    assert result.returncode == 0 and json.loads(result.stdout)["skipped"] == 0, result.stdout + result.stderr
    assert begun <= {each["kind"] for each in summary["alarms"]}
    assert all(each["text"] and each["remedy"] and each["times"] >= 1 for each in summary["alarms"])


def test_dry_run_prints_the_schedule_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chaos", str(write_config(tmp_path)), "--dry-run", "--run-dir", str(tmp_path / "run")]
    told = []
    for _ in range(2):
        assert cli.main([*words, "--faults", "5", "--kinds", "cut,kill"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and len(told[0].splitlines()) == 5
    assert not (tmp_path / "run").exists()
    assert cli.main([*words, "--kinds", "flood"]) == cli.WRONG_INPUT
    assert "flood; choose from kill" in capsys.readouterr().err


ISLANDS = ("island-0", "island-1", "island-2", "island-3")


def draw(seed: int = 1, **changes: Any) -> tuple[ChaosFault, ...]:
    options: dict[str, Any] = {"faults": 48, "steps": 10_000, "silence_s": 3.0} | changes
    return draw_schedule(seed, options.pop("islands", ISLANDS), **options)


def test_equal_seeds_equal_schedules_and_others_differ() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert len({str(draw(seed)) for seed in range(20)}) == 20


def test_every_kind_and_every_island_has_its_share() -> None:
    schedule = draw(faults=10 * len((*KINDS, *SIGNS)), kinds=(*KINDS, *SIGNS))
    assert Counter(fault.kind for fault in schedule) == dict.fromkeys((*KINDS, *SIGNS), 10)
    hit = Counter(fault.target for fault in schedule)
    assert hit.pop("syncer") == 10 * len(SYNCER_KINDS)
    assert set(hit) == set(ISLANDS) and max(hit.values()) - min(hit.values()) <= 1
    assert {fault.kind for fault in draw(kinds=("cut", "nan"))} == {"cut", "nan"}
    assert len(draw(islands=ISLANDS[:2], kinds=("kill",))) == 48


def test_faults_are_numbered_in_order_within_their_share_of_the_run() -> None:
    schedule = draw(faults=100)
    assert [fault.number for fault in schedule] == list(range(1, 101))
    steps = [fault.at_step for fault in schedule]
    assert steps == sorted(steps)
    assert steps[0] >= FIRST * 10_000 and steps[-1] <= LAST * 10_000
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 2 * 8500 / 100 + 1


def test_what_lasts_has_an_end_and_some_outlast_the_lease() -> None:
    schedule = draw(faults=600)
    lasting = {"stop", "stop-syncer", "black-hole", "slow-link", "full-disk"}
    assert {fault.kind for fault in schedule if fault.duration_s > 0} == lasting
    assert all(fault.duration_s > 0 for fault in schedule if fault.kind in lasting)
    stops = [fault.duration_s for fault in schedule if fault.kind == "stop"]
    assert min(stops) < 3.0 < max(stops) <= 6.0


def test_a_fault_says_everything_in_words() -> None:
    for fault in draw(faults=200):
        words = str(fault)
        assert f"#{fault.number} step {fault.at_step}: {fault.kind} {fault.target}" in words
        assert not fault.amount or str(fault.amount) in words
        assert not fault.how or fault.how.lower() in words.lower()
        assert not fault.duration_s or f"{fault.duration_s:.1f} s" in words


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kinds": ("cut", "flood")}, "flood; choose from kill, stop"),
        ({"kinds": ()}, "none; choose from"),
        ({"faults": 0}, "0 faults; use 1 to"),
        ({"faults": 10_001}, "10001 faults"),
        ({"islands": ISLANDS[:2]}, "2 islands; use at least 2, and 3 for kill-donor"),
        ({"islands": ISLANDS[:1], "kinds": ("cut",)}, "1 islands"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        draw(**changes)


def test_islands_of_several_slices_have_more_kinds_of_faults() -> None:
    assert {*possible_kinds("127.0.0.1:0", slices=2)} == {*KINDS, *SLICE_KINDS}
    assert possible_kinds("127.0.0.1:0", ["nan", "slow"], 2) == ["nan", "slow"]
    assert {*KINDS, *SLICE_KINDS} - {*possible_kinds("127.0.0.1:0", slices=2, islands=2)} == {"kill-donor"}
    with pytest.raises(ValueError, match=r"--kinds has kill-slice, and an island has one slice \(islands.slices\)"):
        possible_kinds("127.0.0.1:0", ["kill", "kill-slice"])


def test_an_order_is_obeyed_by_the_loop_of_the_slice_that_leads(tmp_path: Path) -> None:
    """A slice reads the order before it leads, and its loop is not the built-in one."""
    order = order_file(tmp_path, "island-0")
    order.parent.mkdir()
    before = signal.getsignal(signal.SIGUSR1)
    try:
        orders = Orders(order)
        write_json(order, {"bad_loss": True, "ahead_s": 30})
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: orders.bad_loss, "the order")
    finally:
        signal.signal(signal.SIGUSR1, before)
    sliced = SimpleNamespace(step=lambda clock: clock + 1, wait=lambda handle: {"loss": 1.0, "slices": 2}, batch_size=6)
    loop = TimedLoop(cast(Any, sliced), LineFile(tmp_path / "waits"), 0.0, orders)
    metrics = loop.wait(loop.step(7))
    assert loop.batch_size == 6 and metrics["slices"] == 2 and np.isnan(metrics["loss"]) and orders.ahead_s == 30
    orders.bad_loss = False
    assert loop.wait(loop.step(8)) == {"loss": 1.0, "slices": 2}


def test_a_bucket_leaves_no_place_for_faults_of_a_link() -> None:
    assert possible_kinds("127.0.0.1:0") == list(KINDS) and possible_kinds("127.0.0.1:0", ["cut"]) == ["cut"]
    assert {*KINDS} - {*possible_kinds("s3://b/p")} == {*LINK_KINDS}
    assert possible_kinds("s3://b/p", ["kill", "slow"]) == ["kill", "slow"]
    with pytest.raises(
        ValueError, match=r"--kinds has cut, corrupt, faults of a relay, and transport.address s3://b/p"
    ):
        possible_kinds("s3://b/p", ["kill", "cut", "corrupt"])


def test_a_slice_that_leads_later_does_not_obey_an_order_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slices of the island read the order, and the one that led before has sent the bad values."""
    monkeypatch.setattr(learner.joined, "unix_s", learner.joined.unix_s)
    monkeypatch.setattr(learner, "LearnerRun", lambda *_, **__: None)
    monkeypatch.setattr(learner, "began_unix_s", lambda run_dir: 0.0)
    order = order_file(tmp_path, "island-0")
    order.parent.mkdir()
    before = signal.getsignal(signal.SIGUSR1)
    try:
        make = chaos_learner(tmp_path, "island-0")
        (orders,) = cast(Any, make).args
        write_json(order, {"how": "nan", "values": 3})
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: orders.left == 3, "the order")
        config = SimpleNamespace(wire=SimpleNamespace(up=None))
        joining = SimpleNamespace(run_dir=tmp_path, learner_id="island-0", incarnation=2, config=config)
        make(cast(Any, joining), threading.Event())
        assert orders.left == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
