"""Mistaken commands on the folder of a running run, and damage to the folder of an ended run."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attack.runs import (
    BEGIN_S,
    END_S,
    QUICK_S,
    SLOW_S,
    SMALL,
    Folder,
    completes,
    lines_of,
    lose_an_island,
    training,
    under_way,
)
from attack.site import Site, comes_true, syncer, wait_until
from attack.table import CATALOGUE, Findings, Ground
from diloco_jax.runtime.local.run import next_incarnation
from diloco_jax.runtime.records.signals import WRONG_INPUT
from tests.runtime.helpers import environment, kill_processes, notes, processes_of, run, status

REFUSED_WITHIN_S = 90.0
# Ten starts of a run, each with at most 15 rounds and two more seconds, must not complete it.
KILLED_STEPS, KILLED_STEP_S = 800, 0.04
# A refused command must not change these files. Other files of a running run grow, or are replaced twice a second.
STILL = ("config.yaml", "syncer.address", "summary.json", "checkpoints")
REFUSED = "the command is refused and changes no file; an island killed after it returns; complete, audit clean"


def still(run_dir: Path) -> dict[str, tuple[int, str]]:
    """Return the time and the hash of each file that must not change."""
    found = {}
    for name in STILL:
        top = run_dir / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            # A snapshot has another name until it is complete.
            if path.is_file() and ".part" not in str(path) and ".arrays" not in str(path):
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path.relative_to(run_dir))] = (path.stat().st_mtime_ns, digest)
    return found


def _state_stays(run_dir: Path, over: threading.Event, bad: list[str]) -> None:
    """Watch the status of a running run until `over`, and add problems to `bad`."""
    while not over.wait(0.05):
        try:
            state = status(run_dir).get("state")
        except ValueError:
            state = "unreadable"
        if state != "running":
            bad.append(f"status.json says {state!r}")
            return


def unharmed(place: Folder, command: list[Any], seen: Findings) -> None:
    """Run a mistaken command on a running run, and expect that it is refused and changes nothing."""
    before, bad, over = still(place.run_dir), list[str](), threading.Event()
    watch = threading.Thread(target=_state_stays, args=(place.run_dir, over, bad))
    watch.start()
    process = place.start(*command)
    last = place.end(process, REFUSED_WITHIN_S)
    over.set()
    watch.join()
    seen.expect(process.returncode == WRONG_INPUT, f"refused: {last}", f"it ended with {process.returncode}: {last}")
    no_change(place.run_dir, before, seen)
    seen.expect(not bad, "status as it was", "; ".join(bad))


def no_change(run_dir: Path, before: dict[str, tuple[int, str]], seen: Findings) -> None:
    """Expect that no file has changed."""
    after = still(run_dir)
    changed = [name for name, is_like in before.items() if after.get(name) != is_like]
    seen.expect(not changed, "no file changed", f"changed or missing: {', '.join(changed)}")


def _mistake(name: str, about: str, command: Callable[[Folder], list[Any]]) -> None:
    def mistake(ground: Ground, seen: Findings) -> None:
        with training(ground.folder) as (place, supervisor):
            under_way(place, supervisor)
            unharmed(place, command(place), seen)
            lose_an_island(place, seen)
            completes(place, supervisor, seen)

    mistake.__doc__ = about
    CATALOGUE.add(name, REFUSED)(mistake)


def _rewinding(place: Folder) -> list[Any]:
    return ["syncer", place.run_dir / "config.yaml", "--run-dir", place.run_dir, "--rewind"]


def _resuming(place: Folder) -> list[Any]:
    return ["train", place.config, "--run-dir", place.run_dir, "--quiet", "--resume"]


_mistake("folder-resume", "`train --resume` on a running folder, then the death of an island.", _resuming)
_mistake("folder-rewind", "`syncer --rewind` on a running folder, then the death of an island.", _rewinding)


@CATALOGUE.add("folder-learner", "no file changed; an island killed after it returns; complete, audit clean")
def folder_learner(ground: Ground, seen: Findings) -> None:
    """A second `learner` of the same name on a running folder, by hand, then the death of an island."""
    with training(ground.folder) as (place, supervisor):
        under_way(place, supervisor)
        run_dir, joined = place.run_dir, notes(place.run_dir, "joined", "island-1")
        before, address = still(run_dir), (run_dir / "syncer.address").read_text(encoding="utf-8")
        words = ["--island", "island-1", "--syncer", address, "--incarnation", next_incarnation(run_dir, "island-1")]
        second = place.start("learner", run_dir / "config.yaml", *words, "--run-dir", run_dir)
        comes_true(lambda: second.poll() is not None or notes(run_dir, "joined", "island-1") > joined, BEGIN_S)
        seen.expect(True, "it replaced the first" if second.poll() is None else f"it ended with {second.poll()}")
        no_change(run_dir, before, seen)
        place.end(second, 0.0)
        lose_an_island(place, seen)
        completes(place, supervisor, seen)


def _second_train(name: str, about: str, after_s: float) -> None:
    def second(ground: Ground, seen: Findings) -> None:
        with training(ground.folder) as (place, supervisor):
            place.pace(SLOW_S)
            time.sleep(after_s)
            other = place.train("--seed", "5")
            last = place.end(other, REFUSED_WITHIN_S)
            seen.expect(
                other.returncode == WRONG_INPUT, f"refused: {last}", f"it ended with {other.returncode}: {last}"
            )
            seeds = [
                line for line in lines_of([place.run_dir / "config.yaml"]).splitlines() if line.startswith("seed:")
            ]
            seen.expect("seed: 5" not in seeds, "the first one's config", "config.yaml is that of the second one")
            place.pace(QUICK_S)
            under_way(place, supervisor)
            if supervisor.poll() is None:
                lose_an_island(place, seen)
            completes(place, supervisor, seen)

    second.__doc__ = about
    CATALOGUE.add(name, REFUSED)(second)


# The first one has the folder a moment after its start; the second must not have overtaken it.
_second_train(
    "folder-second-at-once", "A second `train` of another seed in the same folder 1.5 s after the first.", 1.5
)
_second_train("folder-second-later", "A second `train` of another seed in the same folder 4 s after the first.", 4.0)


# Folders of runs that have ended.


class Past:
    """Ended runs that are made once; attacks damage copies of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def stopped(self, folder: Path, name: str = "stopped", rounds: int = 60) -> Site:
        """Return a run of stub learners that was stopped, with three snapshots."""
        with self._lock:
            kept = folder.parent / f"past-{name}"
            if not kept.exists():
                making = folder.parent / f"making-{name}"
                with syncer(making, checkpoints={"keep": 100}) as site:
                    honest = site.honest()
                    wait_until(lambda: honest[0].machine.global_step >= rounds, f"{rounds} rounds")
                    site.stop()
                making.rename(kept)
        return self._copied(kept, folder)

    def finished(self, folder: Path) -> Path:
        """Return the folder of a real run that is complete."""
        with self._lock:
            kept = folder.parent / "past-finished"
            if not kept.exists():
                making = folder.parent / "making-finished"
                place = Folder(making, train={**SMALL["train"], "steps": 120})
                done = place.train()
                last = place.end(done, END_S)
                if done.returncode:
                    raise RuntimeError(f"a run without any attack ended with {done.returncode}: {last}")
                making.rename(kept)
        shutil.copytree(kept / "run", folder / "run")
        return folder / "run"

    @staticmethod
    def _copied(kept: Path, folder: Path) -> Site:
        site = Site(folder / "site", checkpoints={"keep": 100})
        shutil.rmtree(site.run_dir)
        shutil.copytree(kept / "run", site.run_dir)
        return site


PAST = Past()


def refuses(site: Site, words: list[str], wanted: str, seen: Findings) -> None:
    """Run a command on a stopped run's folder, and expect a refusal that matches `wanted`."""
    command = "train" if "--resume" in words else "syncer"
    log = site.log.with_name(f"{command}{''.join(words)}.log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "diloco_jax",
                command,
                str(site.config_path),
                "--run-dir",
                str(site.run_dir),
                *words,
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
    name = " ".join([command, *words])
    logs = [log, site.run_dir / "logs" / "syncer.log"]
    try:

        def listens() -> bool:
            return any("listening at" in each.read_text(errors="replace") for each in logs if each.exists())

        comes_true(lambda: process.poll() is not None or listens())
        code = process.poll()
        if code is None:
            seen.expect(False, "", f"`{name}` trains on without a message")
            return
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
        said = lines[-1][:400]
        right = code == WRONG_INPUT and re.search(wanted, said)
        seen.expect(right, f"`{name}` refused", f"`{name}` ended with {code}: {said[:240]}")
    finally:
        process.kill()
        process.wait()
        kill_processes(site.run_dir)


def _tape_lost(name: str, about: str, damage: Callable[[Path], object]) -> None:
    def lose(ground: Ground, seen: Findings) -> None:
        for number, words in enumerate(([], ["--rewind"], ["--resume"])):
            site = PAST.stopped(ground.folder / str(number))
            before = sorted(path.name for path in (site.run_dir / "checkpoints").iterdir())
            damage(site.run_dir / "tape.jsonl")
            refuses(site, list(words), r"tape", seen)
            after = sorted(path.name for path in (site.run_dir / "checkpoints").iterdir())
            seen.expect(set(before) <= set(after), "all snapshots kept", f"snapshots {before} became {after}")

    lose.__doc__ = about
    CATALOGUE.add(name, "refused by syncer, syncer --rewind and train --resume; the message names the tape")(lose)


_tape_lost("tape-empty", "The tape of a stopped run has no byte.", lambda path: path.write_bytes(b""))
_tape_lost("tape-missing", "The tape of a stopped run is missing.", lambda path: path.unlink())


@CATALOGUE.add("snapshot-foreign", "not loaded, and named")
def snapshot_foreign(ground: Ground, seen: Findings) -> None:
    """The newest snapshot of a stopped run is that of another run of the same config."""
    site = PAST.stopped(ground.folder / "own", "longer", 90)
    other = PAST.stopped(ground.folder / "other")
    foreign = sorted((other.run_dir / "checkpoints").iterdir())[3]
    for path in (site.run_dir / "checkpoints").iterdir():
        if path.name >= foreign.name:
            shutil.rmtree(path)
    size = os.stat(site.run_dir / "tape.jsonl").st_size
    taken = json.loads(_meta(foreign))["tape_bytes"]
    seen.expect(taken <= size, f"taken at byte {taken} of a tape of {size}")
    shutil.copytree(foreign, site.run_dir / "checkpoints" / foreign.name)
    site.start("--rewind")
    try:
        wait_until(lambda: not site.is_running or "listening at" in site.log.read_text(errors="replace"), "the syncer")
        text = site.log.read_text(encoding="utf-8", errors="replace")
        silent = f"continues from {foreign.name}" in text
        seen.expect(not silent, "not taken", f"the run continues from {foreign.name} of another run")
        seen.expect(foreign.name in text, "it is named")
    finally:
        site.close()


def _meta(snapshot: Path) -> str:
    from diloco_jax.runtime.records.checkpoint import CheckpointReader

    return json.dumps(CheckpointReader(snapshot).meta)


def _audited(name: str, about: str, damage: Callable[[Path], None]) -> None:
    def cut(ground: Ground, seen: Findings) -> None:
        ground.folder.joinpath("copy").mkdir()
        run_dir = PAST.finished(ground.folder / "copy")
        clean = run("audit", run_dir)
        seen.expect(clean.returncode == 0, "clean before", f"audit before: {clean.stderr.strip()[-200:]}")
        damage(run_dir)
        found = run("audit", run_dir)
        words = (found.stdout + found.stderr).strip().splitlines()[-1:]
        seen.expect(found.returncode != 0, f"noticed: {words[0][:160] if words else ''}", "audit says nothing")

    cut.__doc__ = about
    CATALOGUE.add(name, "`diloco audit` notices")(cut)


def _cut_lines(path: Path, count: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-count]))


def _double_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if n > 100 and line.startswith(b'["FragmentValue"'))
    lines.insert(number, lines[number])
    path.write_bytes(b"".join(lines))


_audited(
    "tape-cut", "The tape of a complete run lost its last 200 lines.", lambda it: _cut_lines(it / "tape.jsonl", 200)
)
_audited(
    "tape-cut-learner",
    "A learner's tape of a complete run lost its last 40 lines.",
    lambda it: _cut_lines(next((it / "tapes").glob("island-1.*")), 40),
)
_audited(
    "tape-doubled",
    "A line in the middle of a complete run's tape is doubled.",
    lambda it: _double_line(it / "tape.jsonl"),
)


def _some_rounds(place: Folder, supervisor: subprocess.Popen[str], count: int) -> None:
    """Wait until a run has made `count` more rounds, or has ended."""

    def step() -> int:
        return int(status(place.run_dir).get("global_step", 0))

    wanted = step() + count
    comes_true(lambda: supervisor.poll() is not None or step() >= wanted)


@CATALOGUE.add("folder-ten-kills", "every resume works; complete, audit clean, replay identical", long=True)
def folder_ten_kills(ground: Ground, seen: Findings) -> None:
    """All processes of a run with `snapshot_every: 2` are killed ten times at random moments, and it resumes."""
    longer = {**SMALL["train"], "steps": KILLED_STEPS}
    random, place = ground.random, Folder(ground.folder, protocol={"snapshot_every": 2}, train=longer)
    run_dir, resume = place.run_dir, list[str]()
    place.pace(KILLED_STEP_S)
    try:
        for number in range(10):
            supervisor = place.train(*resume)
            # Some kills happen while the processes start.
            if number % 4 != 2:
                _some_rounds(place, supervisor, random.randrange(1, 15))
            time.sleep(2 * random.random())
            if supervisor.poll() is not None:
                seen.expect(False, "", f"start {number + 1} ended: {place.end(supervisor, END_S)}")
                return
            supervisor.kill()
            kill_processes(run_dir)
            supervisor.wait()
            wait_until(lambda: not processes_of(run_dir), "the end of all processes")
            resume = ["--resume"]
        completes(place, place.train("--resume"), seen)
        replay = place.start("replay", run_dir, "--json")
        last = place.end(replay, END_S)
        identical = replay.returncode == 0 and json.loads(last)["identical"]
        seen.expect(identical, "replay identical", f"replay ended with {replay.returncode}: {last}")
    finally:
        kill_processes(run_dir)
