"""The alarms of a run with their remedies, for the page; docs/troubleshooting.md has more of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from diloco_jax.protocol.watch.stats import WAITING, never_merged
from diloco_jax.runtime.records.liveness import AWAY, DEAD, ENDED
from diloco_jax.runtime.records.status import EVALUATING, STARVED


class Alarm(NamedTuple):
    """One thing that is wrong, in words that stay while it is, and what to do."""

    text: str
    remedy: str


OF_ISLANDS = {  # by condition
    "silent": "look at its process and its network; its log is below if it runs on this machine",
    "gone": "look at its machine and its log; it may come back under its name at any time",
    "expelled": "lower its learning rate or change its hardware, then start it again",
    "striking": "values that are not usable come from NaN or a high learning rate; look at its loss and its log",
    "unmerged": "check its link (`diloco doctor`); a larger protocol.overlap_steps gives it more time",
    "slow": "look at its host; a smaller islands.each.NAME.batch_size makes its steps shorter",
}
OF_RUNS = {  # by a part of the alarm's text
    "islands outran rounds": "see what rounds wait for; give the syncer processors; lengthen protocol.sync_every",
    "the tape cannot be written": "free space on the syncer's disk; rounds go on by themselves",
    "the snapshot of": "free space on the syncer's disk; the next snapshot is tried by itself",
    "not evaluated": "`diloco eval RUN` evaluates the newest snapshot",
    "no evaluation at": "look at the islands' logs; the next evaluation is asked for by itself",
    "never merged": "make the run longer than protocol.sync_every, and see in the syncer's log how rounds ended",
}
STARVED_REMEDY = "a larger data.prefetch, or a faster disk or network for the data"
UNKNOWN_REMEDY = "docs/troubleshooting.md lists messages with causes and fixes"


def alarms(status: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Alarm]:
    """List what is wrong with a run, the gravest first."""
    found, state = [], status.get("state", "")
    if state in (*DEAD, AWAY):
        found.append(Alarm(f"the run is {state}", status["remedy"]))
    texts = dict.fromkeys([*status.get("alarms", ()), *summary.get("alarms", ())])
    if unmerged := never_merged(summary.get("unmerged_fragments", ())):
        texts[unmerged] = None
    for text in texts:
        found.append(Alarm(text, next((fix for part, fix in OF_RUNS.items() if part in text), UNKNOWN_REMEDY)))
    if state in (*ENDED, EVALUATING):
        return found
    for row in status.get("learners", ()):
        if (condition := row["condition"]) in OF_ISLANDS:
            found.append(Alarm(f"{row['learner']} is {condition}", OF_ISLANDS[condition]))
        share = row.get("metrics", {}).get(WAITING) or 0.0
        if row["state"] == "active" and share >= STARVED:
            found.append(Alarm(f"{row['learner']} waits for data", STARVED_REMEDY))
    return found
