"""Attacks with SIGSTOP: a stopped merge shard, a stopped syncer."""

import os
import signal
import time
from pathlib import Path

from attack.hostile import rounds_go_on
from attack.runs import training, under_way
from attack.site import comes_true, syncer
from attack.table import CATALOGUE, Findings, Ground
from diloco_jax.runtime.model.merge_shards import MERGE_SHARD

STOPPED_S = 20.0
END_WITHIN_S = 20.0
PATIENCE_S = 150.0


def family(root: int) -> dict[int, str]:
    """Return the descendants of a process, each with its start time, because process ids are used again."""
    parents, born = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)], born[int(entry.name)] = int(fields[1]), fields[19]
    found, fresh = set[int](), {root}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh and pid not in found}
        found |= fresh
    return {pid: born[pid] for pid in found}


def alive(pid: int, born: str) -> bool:
    """Return whether this process still runs; a zombie does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == born and fields[0] != "Z"


@CATALOGUE.add("stopped-shard", "ends within 20 s of Ctrl-C; no process is left")
def stopped_shard(ground: Ground, seen: Findings) -> None:
    """A merge shard is under SIGSTOP when its run gets Ctrl-C."""
    with training(ground.folder, syncer={"shards": 2}) as (place, supervisor):
        under_way(place, supervisor)
        children = family(supervisor.pid)
        shards = [pid for pid in children if _is_shard(pid)]
        seen.expect(len(shards) == 2, "two shards", f"{len(shards)} shards found")
        os.kill(shards[0], signal.SIGSTOP)
        began_s = time.monotonic()
        supervisor.send_signal(signal.SIGINT)
        try:
            ended = comes_true(lambda: supervisor.poll() is not None, PATIENCE_S)
            took_s = time.monotonic() - began_s
            seen.expect(ended and took_s < END_WITHIN_S, f"ended after {took_s:.0f} s")
            comes_true(lambda: not [pid for pid, born in children.items() if alive(pid, born)], 5.0)
            left = [pid for pid, born in children.items() if alive(pid, born)]
            seen.expect(not left, "no process is left", f"{len(left)} processes are left")
        finally:
            for pid, born in children.items():
                if alive(pid, born):
                    os.kill(pid, signal.SIGKILL)


def _is_shard(pid: int) -> bool:
    try:
        return MERGE_SHARD.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


@CATALOGUE.add("stopped-syncer", "learners stay; the same process merges again within 10 s")
def stopped_syncer(ground: Ground, seen: Findings) -> None:
    """The syncer is under SIGSTOP for 20 s."""
    with syncer(ground.folder / "site") as site:
        honest = site.honest()
        epoch = honest[0].machine.epoch
        site.signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        site.signal(signal.SIGCONT)
        began_s, before = time.monotonic(), [stub.merged for stub in honest]
        comes_true(lambda: all(stub.merged > old for stub, old in zip(honest, before, strict=True)))
        took_s = time.monotonic() - began_s
        seen.expect(took_s < 10.0, f"merged again after {took_s:.1f} s")
        seen.expect(honest[0].machine.epoch == epoch, "the same process")
        rounds_go_on(site, honest, seen, "after it")
