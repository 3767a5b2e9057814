"""Attacks with SIGSTOP: a stopped syncer."""

import signal
import time

from attack.hostile import rounds_go_on
from attack.site import comes_true, syncer
from attack.table import CATALOGUE, Findings, Ground

STOPPED_S = 20.0


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
