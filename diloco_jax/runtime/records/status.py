"""The status of a run: how a syncer or a baseline composes it, and how others read it.

tools/terminal/words.py lists the keys. liveness.py checks whether the processes of a status still run.

`diloco status` is often called in a loop, so this module starts without gRPC and NumPy. Readers pass the function that
asks a syncer, which needs both.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from diloco_jax.protocol.texts import clean_all
from diloco_jax.protocol.watch.sites import corpora_of
from diloco_jax.protocol.watch.terms import STARVED, WAITING
from diloco_jax.runtime.figures.table import with_figures
from diloco_jax.runtime.records.files import ADDRESS_FILE, CONFIG_FILE, LOGS, SAMPLE_FILE, STATUS_FILE, SUMMARY_FILE
from diloco_jax.runtime.records.liveness import judge, read_phases, signature
from diloco_jax.runtime.records.telemetry import read_object, write_json
from diloco_jax.transport.link import TransportConfig, check_address

if TYPE_CHECKING:
    from diloco_jax.protocol.syncer.machine import Syncer
    from diloco_jax.protocol.watch.stats import RunStats
    from diloco_jax.settings.run import RunConfig

ANSWER_TIMEOUT_S = 5.0
# In these states of a run every round is done. In the first one an island may still evaluate the final model.
EVALUATING, COMPLETE = MERGED_ALL = ("evaluating", "complete")
# Number of islands that "waiting for" names because they wait for data.
STARVED_MAX = 4

# The figures of an island without a link.
NO_RATES: Mapping[str, float | None] = {"up_bytes_per_s": None, "down_bytes_per_s": None}
# The condition of an island that a resumed run awaits.
RETURNS = {"condition": "joining", "reason": "starts; not connected yet since the run was resumed"}


def compose_status(
    run: str,
    syncer: Syncer,
    stats: RunStats,
    now_s: float,
    *,
    stopped: bool,
    blocked: str,
    metrics: Mapping[str, Mapping[str, float]],
    processes: Mapping[str, int | None],
    left_s: float | None,
    awaited: Collection[str] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
    rates: Mapping[str, Mapping[str, float | None]] = MappingProxyType({}),
    **facts: Any,
) -> dict[str, Any]:
    """Return what a run with a syncer does now, for `diloco status` and all views.

    Args:
        stopped: whether somebody has ended the run.
        blocked: what the syncer itself waits for, such as space on its disk; "" if it waits for islands or rounds.
        metrics: the newest values that each island measured.
        processes: process numbers of the islands on the syncer's machine.
        left_s: seconds until the last global step; None while unknown.
        awaited: islands of a resumed run that start and have not connected since.
        refused: islands -> why their newest greeting was refused.
        rates: bytes per second on the links of connected islands (runtime/syncer/island_traffic.py).
        facts: values that the status holds as they are: `alarms` that stand, `episodes`, `wire`, and the results of the
            newest evaluation.
    """
    state = "running" if stats.tokens else "starting"
    if syncer.finished:
        state = COMPLETE if stopped or syncer.over else EVALUATING
    elif stopped:
        state = "stopped"
    waiting_for = syncer.waiting_for(now_s)
    connected = {member.learner_id for member in syncer.membership.connected()}
    refusals = {name: why for name, why in refused.items() if name not in connected}
    if state == "running" and awaited and not syncer.membership.live:
        state = "starting"
        waiting_for = f"islands, which are starting: {len(connected)} of {len(connected) + len(awaited)} connected"
    return status_of(
        run=run,
        state=state,
        global_step=syncer.global_step,
        total_steps=syncer.progress.expected_steps,
        left_s=left_s,
        epoch=syncer.epoch,
        waiting_for=blocked or ("nothing: the run was stopped" if state == "stopped" else waiting_for),
        wall_s=now_s,
        tokens=stats.tokens,
        contributors_per_round=stats.contributors_per_round,
        samples=syncer.leases.fates._asdict(),
        bans=[{"learner": name, "reason": why} for name, why in syncer.membership.bans],
        refused=[{"learner": name, "reason": why} for name, why in refusals.items()],
        corpora=corpora_of(syncer, facts.get("eval_scores", {})),
        learners=[
            row
            | (RETURNS if row["learner"] in awaited else {})
            | ({"reason": f"refused: {refusals[row['learner']]}"} if row["learner"] in refusals else {})
            | {"metrics": metrics.get(row["learner"], {})}
            | {**rates.get(row["learner"], NO_RATES)}
            | {"process": None if row["state"] == "gone" else processes.get(row["learner"])}
            for row in stats.status(now_s)
        ],
        **facts,
    )


def upcoming(global_step: int, total_steps: int, periods: Mapping[str, int]) -> dict[str, int]:
    """Return the global step of the next event of each kind, for kinds that are due again before the run's end.

    Args:
        total_steps: expected last global step.
        periods: global steps from one event to the next, by kind; 0 means never.
    """
    due = {kind: (global_step // every + 1) * every for kind, every in periods.items() if every > 0}
    return {kind: step for kind, step in due.items() if step <= total_steps}


def status_of(
    *,
    state: str,
    left_s: float | None,
    wall_s: float,
    waiting_for: str,
    learners: Sequence[Mapping[str, Any]],
    **facts: Any,
) -> dict[str, Any]:
    """Return a status from facts about a run, with the figures that are computed from them, signed by this process.

    Args:
        waiting_for: what the run waits for; islands that wait for data are added.
        facts: facts that the status holds as they are.
    """
    return with_figures(
        "status",
        {
            "state": state,
            "left_s": None if left_s is None or state != "running" else round(left_s, 1),
            "wall_s": round(wall_s, 3),
            "waiting_for": waiting_for + starved(learners),
            "learners": list(learners),
            "said": signature(),
            **facts,
        },
    )


def starved(learners: Sequence[Mapping[str, Any]]) -> str:
    """Return the islands that wait for data for a notable share of their time, as a text that ends "waiting for"."""
    shares = {row["learner"]: row.get("metrics", {}).get(WAITING, 0.0) for row in learners if row["state"] == "active"}
    found = [f"{name} {share:.0%} of its time" for name, share in shares.items() if share >= STARVED]
    return f"; data: {', '.join(found[:STARVED_MAX])}" + ", ..." * (len(found) > STARVED_MAX) if found else ""


def last_status(run_dir: Path) -> dict[str, Any]:
    """Return the status in a run's folder; {} if it cannot be read."""
    try:
        status = json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def clear_for_start(run_dir: Path, *, resume: bool) -> Callable[[], None]:
    """Remove what earlier processes wrote about a run, and return a function that restores it.

    Only the process that holds the folder's lock may call this.
    """
    kept: dict[Path, bytes] = {}
    for path in (run_dir / name for name in (ADDRESS_FILE, SUMMARY_FILE, STATUS_FILE, SAMPLE_FILE)):
        with contextlib.suppress(FileNotFoundError):
            kept[path] = path.read_bytes()
    (run_dir / ADDRESS_FILE).unlink(missing_ok=True)
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    (run_dir / SAMPLE_FILE).unlink(missing_ok=True)
    if resume:
        start_again(run_dir)

    def put_back() -> None:
        for path, content in kept.items():
            with contextlib.suppress(OSError):
                path.write_bytes(content)

    return put_back


def start_again(run_dir: Path) -> None:
    """Mark the status of a folder as that of a run that restarts, because its processes have ended."""
    if status := last_status(run_dir):
        present = {"state": "starting", "waiting_for": "the syncer", "learners": [], "alarms": [], "tokens_per_s": 0.0}
        present["left_s"] = None
        with contextlib.suppress(OSError):
            write_json(run_dir / STATUS_FILE, {**status, **present, "said": signature()})


def last_state(run_dir: Path) -> str:
    """Return the last state that the syncer wrote, one of those in `compose_status`; "" if there is none."""
    return str(last_status(run_dir).get("state", ""))


def is_banned(run_dir: Path, learner_id: str) -> bool:
    """Return whether the last status lists a learner as banned."""
    # Statuses of older versions do not have the key.
    return any(ban["learner"] == learner_id for ban in last_status(run_dir).get("bans", ()))


def complete(run_dir: Path) -> bool:
    """Return whether the last status is one of MERGED_ALL."""
    return last_state(run_dir) in MERGED_ALL


def is_over(run_dir: Path) -> bool:
    """Return whether a run's folder has the summary of a complete run."""
    try:
        return read_object(run_dir / SUMMARY_FILE).get("complete") is True
    except (OSError, ValueError):
        return False


def known_address(run_dir: Path, config: RunConfig) -> str:
    """Return the address of a run's syncer: from the folder if it is on this machine, else from the config."""
    address_file = run_dir / ADDRESS_FILE
    return address_file.read_text(encoding="utf-8").strip() if address_file.exists() else config.transport.address


def is_address(run: str) -> bool:
    """Return whether an argument is the address of a syncer, rather than the folder of a run."""
    return ":" in run and not Path(run).exists()


def syncer_at(run: str, known: TransportConfig, *, allow_plaintext: bool) -> TransportConfig:
    """Return the settings that reach the syncer of a run, a folder or host:port.

    Args:
        allow_plaintext: whether an address other than loopback may be reached without encryption.

    Raises:
        ValueError: the folder holds no address.
    """
    plain = allow_plaintext or known.allow_plaintext
    path = Path(run) / ADDRESS_FILE
    if not is_address(run) and not path.exists():
        if not Path(run).exists():
            raise ValueError(f"{run} is neither a run's folder nor a syncer's host:port")
        raise ValueError(f"{run} has no {ADDRESS_FILE}, so its syncer never listened; start the run, or give host:port")
    address = run if is_address(run) else path.read_text(encoding="utf-8").strip()
    check_address(address, "the address" if is_address(run) else str(path))
    return replace(known, address=address, allow_plaintext=plain, connect_timeout_s=ANSWER_TIMEOUT_S)


def read_status(
    run: str,
    ask_syncer: Callable[[TransportConfig], str],
    *,
    allow_plaintext: bool = False,
    transport: Callable[[], TransportConfig] = TransportConfig,
) -> dict[str, Any]:
    """Return the status of a run; that of a folder is corrected if its processes have ended (`liveness.judge`).

    Args:
        ask_syncer: returns the JSON of a syncer's status (`ask_status` of transport/session/calls.py).
        transport: returns certificates and token, for a syncer that requires them. It is not called if the file is
            fresh, because a config takes a second to load.

    Raises:
        ValueError: there is no such run, it has not started, or the address is not allowed.
        TransportError: nothing answers at the address.
    """

    def ask() -> dict[str, Any]:
        config = syncer_at(run, transport(), allow_plaintext=allow_plaintext)
        answer: dict[str, Any] = clean_all(json.loads(ask_syncer(config)))
        return answer

    def ask_if_there() -> dict[str, Any] | None:
        # TransportError is an OSError.
        with contextlib.suppress(ValueError, OSError):
            return ask() or None
        return None

    if is_address(run):
        status = ask()
        if not status:
            raise ValueError(f"the syncer at {run} has just started and has no status yet; try again")
        return status
    folder = Path(run)
    path = folder / STATUS_FILE
    try:
        status = read_object(path, "state", "global_step", "learners")
    except OSError as error:
        if (folder / CONFIG_FILE).exists():
            raise ValueError(f"the run in {run} has no status yet: {_before_status(folder)}") from error
        raise ValueError(f"{run} has no {STATUS_FILE} ({error.strerror}); give a run's folder or host:port") from error
    return judge(folder, status, ask_if_there)


def _before_status(folder: Path) -> str:
    """Describe a run that has no status: what its processes do, or where to look."""
    if phases := read_phases(folder):
        return "it is starting; " + "; ".join(
            f"{phase.name}: {phase.words}, for {phase.ago_s:.0f} s" for phase in phases
        )
    # Only `diloco train` writes the outputs of its processes to files.
    where = folder / LOGS if (folder / LOGS).exists() else "the output of its syncer"
    return f"it is starting, or ended before it started; see {where}"
