"""Followers, newcomers and partitions at the edge of a run, islands of several hosts, and a torn tape."""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attack.hostile import USUAL_ROUNDS, aftermath, rounds_go_on
from attack.owing import KEPT_MIN, rounds_per_s
from attack.runs import BEGIN_S, SMALL, completes, training, under_way
from attack.site import comes_true, syncer, wait_until
from attack.table import CATALOGUE, Findings, Ground
from diloco_jax.tools.chaos.relay import Relay
from tests.runtime.helpers import environment, notes, processes_of

WINDOW_S = 20.0
# The model has 2.6 kB, and half of it goes each way in every round, twenty times per second: one link carries that
# with little to spare, and the other one carries a tenth of it.
NARROW_BYTES_PER_S, TOO_NARROW_BYTES_PER_S = 60_000.0, 3_000.0
MERGED_WITHIN_S = 60.0
PARTITION_S = 300.0
FOLLOWERS, FOLLOWER_KILLS = 3, 3
HOST_KILLS, HOST_STOP_S = 3, 8.0
# The run is not complete before the last return; its end has steps without a pause.
HOSTS_STEPS = 1500
TWO_HOSTS: dict[str, Any] = {"devices": 2, "hosts": 2, "mesh": {"fsdp": 2}, "restart_delay_s": 0.1}


def follower(address: str, folder: Path) -> subprocess.Popen[str]:
    """Start a follower that writes every model to a folder."""
    words = ["follow", address, "--out", str(folder), "--every", "1", "--format", "npz", "--name", folder.name]
    return subprocess.Popen(
        [sys.executable, "-m", "diloco_jax", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def model_of(folder: Path) -> dict[str, np.ndarray] | None:
    """Return the newest model of a follower's folder, None before the first one."""
    path = folder / "newest" / "parameters.npz"
    if not path.exists():
        return None
    with np.load(path) as found:
        return dict(found)


@contextmanager
def followers() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list of processes that end with the block."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


@CATALOGUE.add("follow-many", f"the others keep {KEPT_MIN:g} of their rounds; newest is always whole", long=True)
def follow_many(ground: Ground, seen: Findings) -> None:
    """Three followers, one on a narrow link, one killed three times at random moments, and two in one folder."""
    with syncer(ground.folder / "site") as site, followers() as started, Relay(site.address) as narrow:
        honest = site.honest()
        narrow.change(bytes_per_s=NARROW_BYTES_PER_S)
        alone = rounds_per_s(honest, WINDOW_S)
        folders = [ground.folder / f"follower-{number}" for number in range(FOLLOWERS)]
        addresses = [site.address, site.address, narrow.address]
        started += [follower(*each) for each in zip(addresses, folders, strict=True)]
        wait_until(lambda: all(model_of(folder) is not None for folder in folders), "the first models", BEGIN_S)
        kept = rounds_per_s(honest, WINDOW_S) / alone
        seen.expect(kept >= KEPT_MIN, f"the others keep {kept:.2f} of {alone:.1f} rounds/s")
        second = follower(site.address, folders[0])
        started.append(second)
        comes_true(lambda: second.poll() is not None)
        seen.expect(second.poll() == 2, f"a second one in a folder ended with {second.poll()}")
        for _ in range(FOLLOWER_KILLS):
            time.sleep(2 * ground.random.random())
            started[1].kill()
            started[1].wait()
            whole = model_of(folders[1])
            seen.expect(whole is not None and all(np.isfinite(each).all() for each in whole.values()), "whole")
            before = os.readlink(folders[1] / "newest")
            started[1] = follower(site.address, folders[1])
            newer = comes_true(lambda before=before: os.readlink(folders[1] / "newest") != before)
            seen.expect(newer, "it follows again", "a killed follower does not follow again")
        aftermath(site, honest, seen)


def _joins(name: str, bytes_per_s: float, *, follows: bool) -> None:
    """Add an attack: a newcomer joins over a link of this rate, and can follow the rounds or not."""

    def join(ground: Ground, seen: Findings) -> None:
        with syncer(ground.folder / "site", islands={"count": 3}) as site, Relay(site.address) as narrow:
            honest = site.honest()
            alone = rounds_per_s(honest, WINDOW_S)
            way = site.way(narrow.address)
            narrow.change(bytes_per_s=bytes_per_s)
            newcomer = site.stub("newcomer", way=way)
            # The first round that asks it may wait for it.
            time.sleep(WINDOW_S / 4)
            kept = rounds_per_s(honest, WINDOW_S) / alone
            seen.expect(kept >= KEPT_MIN, f"the others keep {kept:.2f} of {alone:.1f} rounds/s")
            if follows:
                merged = comes_true(lambda: newcomer.merged > USUAL_ROUNDS, MERGED_WITHIN_S)
                seen.expect(
                    merged and newcomer.is_running, "the newcomer is merged", newcomer.ended or newcomer.trouble
                )
            else:
                rows = {row["learner"]: row["condition"] for row in site.status()["learners"]}
                seen.expect(rows["newcomer"] == "unanswered", f"the status calls it {rows['newcomer']}")
            aftermath(site, honest, seen)

    join.__doc__ = f"A newcomer joins over a link of {bytes_per_s / 1000:g} kB/s, for rounds of 26 kB/s."
    expected = "it is merged" if follows else "the status names it"
    CATALOGUE.add(name, f"{expected}; the others keep {KEPT_MIN:g} of their rounds", long=True)(join)


_joins("join-narrow", NARROW_BYTES_PER_S, follows=True)
_joins("join-too-narrow", TOO_NARROW_BYTES_PER_S, follows=False)


@CATALOGUE.add("partition-minutes", "the others' rounds continue; it is merged again within a minute", long=True)
def partition_minutes(ground: Ground, seen: Findings) -> None:
    """Nothing passes between a learner and the syncer for five minutes, in both directions."""
    with syncer(ground.folder / "site") as site, Relay(site.address) as relay:
        honest = site.honest()
        cut = site.stub("cut", way=site.way(relay.address))
        wait_until(lambda: cut.merged > USUAL_ROUNDS, "rounds that merge it")
        alone = statistics.median(rounds_per_s(honest, WINDOW_S / 2) for _ in range(2))
        relay.change(hold=True)
        ends_s = time.monotonic() + PARTITION_S
        rounds_per_s(honest, WINDOW_S)
        kept = rounds_per_s(honest, WINDOW_S) / alone
        seen.expect(kept >= KEPT_MIN, f"the others keep {kept:.2f} of {alone:.1f} rounds/s")
        time.sleep(max(0.0, ends_s - time.monotonic()))
        before, began_s = cut.merged, time.monotonic()
        relay.heal()
        again = comes_true(lambda: cut.merged > before + 2, 60.0)
        seen.expect(again, f"merged again after {time.monotonic() - began_s:.0f} s", cut.ended or cut.trouble)
        aftermath(site, honest, seen)


@CATALOGUE.add("tape-torn", "the syncer continues without the torn line, and names nothing else as lost")
def tape_torn(ground: Ground, seen: Findings) -> None:
    """The syncer is killed, and half of its tape's last line is lost, three times."""
    with syncer(ground.folder / "site") as site:
        honest = site.honest()
        for number in range(3):
            site.kill()
            tape = site.run_dir / "tape.jsonl"
            lines = tape.read_bytes().splitlines(keepends=True)
            tape.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
            site.start()
            rounds_go_on(site, honest, seen, f"after tear {number + 1}")


def _hosts(name: str, expected: str, about: str, harm: Callable[[Ground, list[int]], None]) -> None:
    """Add an attack on the second host of island-0, which is harmed several times while the run trains."""

    def attack(ground: Ground, seen: Findings) -> None:
        longer = {**SMALL["train"], "steps": HOSTS_STEPS}
        with training(ground.folder, islands=TWO_HOSTS, train=longer) as (place, supervisor):
            under_way(place, supervisor)
            for _ in range(HOST_KILLS):
                joined = notes(place.run_dir, "joined", "island-0")
                begun = {name: notes(place.run_dir, "merged", name) for name in ("island-0", "island-1")}
                harm(ground, _second_hosts(place.run_dir))

                def merged_again(name: str, begun: dict[str, int] = begun) -> bool:
                    return notes(place.run_dir, "merged", name) > begun[name] + 3

                seen.expect(comes_true(partial(merged_again, "island-1"), BEGIN_S), "the other island is merged")
                back = comes_true(partial(merged_again, "island-0"), BEGIN_S)
                starts = notes(place.run_dir, "joined", "island-0") - joined
                seen.expect(back, f"merged again after {starts} starts", "it is not merged again")
            completes(place, supervisor, seen)

    attack.__doc__ = about
    CATALOGUE.add(name, expected, long=True)(attack)


def _second_hosts(run_dir: Path) -> list[int]:
    found = processes_of(run_dir).items()
    return [pid for pid, words in found if "--island island-0" in words and "--host 1" in words]


def _kill(ground: Ground, pids: list[int]) -> None:
    time.sleep(2 * ground.random.random())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _stop(ground: Ground, pids: list[int]) -> None:
    time.sleep(2 * ground.random.random())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(HOST_STOP_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


_hosts(
    "host-killed",
    "the other island continues, and the island returns; complete, audit clean",
    "The second host of an island is killed three times at random moments, also in the middle of a version.",
    _kill,
)
_hosts(
    "host-stopped",
    "the other island continues, and the island is merged again; complete, audit clean",
    f"The second host of an island is under SIGSTOP for {HOST_STOP_S:g} s, three times.",
    _stop,
)
