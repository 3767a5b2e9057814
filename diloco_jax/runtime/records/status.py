"""The status of a run: what the syncer says of itself, and how to ask for it.

live.py describes the keys, liveness.py checks a file that nobody may write any more.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diloco_jax.protocol.texts import clean_all
from diloco_jax.protocol.watch.alarms import STARVED, Standing
from diloco_jax.protocol.watch.stats import WAITING, RunStats
from diloco_jax.runtime.figures.table import with_figures
from diloco_jax.runtime.records.files import ADDRESS_FILE, CONFIG_FILE, LOGS, STATUS_FILE, SUMMARY_FILE
from diloco_jax.runtime.records.liveness import judge, signature
from diloco_jax.runtime.records.telemetry import read_object, write_json
from diloco_jax.transport.calls import ask_status
from diloco_jax.transport.link import TransportConfig, split_address

if TYPE_CHECKING:
    from diloco_jax.protocol.syncer.machine import Syncer
    from diloco_jax.settings.run import RunConfig

ANSWER_TIMEOUT_S = 5.0
EVALUATING = "evaluating"  # state of a run: every round is done, an island evaluates the final model
STARVED_MAX = 4  # names of islands that are told to wait for data


def compose_status(
    run: str,
    syncer: Syncer,
    stats: RunStats,
    now_s: float,
    *,
    stopped: bool,
    blocked: str,
    metrics: Mapping[str, Mapping[str, float]],
    left_s: float | None,
    **told: Any,
) -> dict[str, Any]:
    """Return what the run does now, for `diloco status` and the live view.

    Args:
        stopped: whether somebody has ended it.
        blocked: what everybody waits for, such as a full disk of the syncer; "" if it is for islands or rounds.
        metrics: what each island measured last.
        left_s: seconds until the last global step, None while unknown.
        told: said as it is: `alarms` that stand, each with its remedy, `episodes`, all that ever stood, `wire`, and
            what the newest evaluation found.
    """
    state = "running" if stats.tokens else "starting"
    if syncer.finished:
        state = "complete" if stopped or syncer.over else EVALUATING
    elif stopped:
        state = "stopped"
    return status_of(
        run=run,
        state=state,
        global_step=syncer.global_step,
        total_steps=syncer.progress.expected_steps,
        left_s=left_s,
        epoch=syncer.epoch,
        waiting_for=blocked or syncer.waiting_for(now_s),
        wall_s=now_s,
        tokens=stats.tokens,
        contributors_per_round=round(stats.contributors_per_round, 3),
        samples=syncer.leases.fates._asdict(),
        learners=[row | {"metrics": metrics.get(row["learner"], {})} for row in stats.status(now_s)],
        **told,
    )


def status_of(
    *,
    state: str,
    left_s: float | None,
    wall_s: float,
    waiting_for: str,
    learners: Sequence[Mapping[str, Any]],
    **told: Any,
) -> dict[str, Any]:
    """Return a status from facts about a run, with the figures that are computed from them, signed by this process.

    Args:
        waiting_for: what the run waits for; islands that wait for data are added.
        told: facts that the status holds as they are.
    """
    return with_figures(
        "status",
        {
            "state": state,
            "left_s": None if left_s is None or state != "running" else round(left_s, 1),
            "wall_s": round(wall_s, 1),
            "waiting_for": waiting_for + starved(learners),
            "learners": list(learners),
            "said": signature(),
            **told,
        },
    )


def starved(learners: Sequence[Mapping[str, Any]]) -> str:
    """Name the islands that notably wait for their data, as a part of what everybody waits for."""
    shares = {row["learner"]: row.get("metrics", {}).get(WAITING, 0.0) for row in learners if row["state"] == "active"}
    found = [f"{name} {share:.0%} of its time" for name, share in shares.items() if share >= STARVED]
    return f"; data: {', '.join(found[:STARVED_MAX])}" + ", ..." * (len(found) > STARVED_MAX) if found else ""


class Earlier(NamedTuple):
    """Facts that only the status of an earlier process tells: up to half a second old, good enough for people."""

    wire: dict[str, int]
    eval_loss: float | None
    episodes: Sequence[Standing] = ()  # of alarms


NOTHING_EARLIER = Earlier({"up_bytes": 0, "down_bytes": 0}, None)


def _last_words(run_dir: Path) -> dict[str, Any]:
    """Return what the file of the status says; nothing when it cannot be read."""
    try:
        said = json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def read_earlier(run_dir: Path) -> Earlier:
    """Return what the last process that wrote this folder's status had counted; zeros when that cannot be read."""
    said = _last_words(run_dir)
    try:
        wire = {key: int(said["wire"][key]) for key in ("up_bytes", "down_bytes")}
        return Earlier(wire, said["eval_loss"], [Standing.of(told) for told in said.get("episodes", ())])
    except (ValueError, KeyError, TypeError):
        return NOTHING_EARLIER


def clear_for_start(run_dir: Path, *, resume: bool) -> Callable[[], None]:
    """Remove what processes that are gone said of a run; return a function that puts it back.

    Only the process that holds the folder's lock may call it.
    """
    kept: dict[Path, bytes] = {}
    for path in (run_dir / name for name in (ADDRESS_FILE, SUMMARY_FILE, STATUS_FILE)):
        with contextlib.suppress(FileNotFoundError):
            kept[path] = path.read_bytes()
    (run_dir / ADDRESS_FILE).unlink(missing_ok=True)
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    if resume:
        start_again(run_dir)

    def put_back() -> None:
        for path, content in kept.items():
            with contextlib.suppress(OSError):
                path.write_bytes(content)

    return put_back


def start_again(run_dir: Path) -> None:
    """Say that the run of this folder starts again: its last status is of processes that are gone."""
    if said := _last_words(run_dir):
        told = {"state": "starting", "waiting_for": "the syncer", "learners": [], "alarms": [], "tokens_per_s": 0.0}
        told["left_s"] = None
        with contextlib.suppress(OSError):
            write_json(run_dir / STATUS_FILE, {**said, **told, "said": signature()})


def last_state(run_dir: Path) -> str:
    """Return the last state that the syncer told: one of those in `compose_status`; "" if it told nothing."""
    return str(_last_words(run_dir).get("state", ""))


def complete(run_dir: Path) -> bool:
    """Tell if the syncer has said that every round is done; an island may still evaluate the final model."""
    return last_state(run_dir) in (EVALUATING, "complete")


def known_address(run_dir: Path, config: RunConfig) -> str:
    """Return where a run's syncer listens: as its folder says, if it is on this machine, else as the config does."""
    told = run_dir / ADDRESS_FILE
    return told.read_text(encoding="utf-8").strip() if told.exists() else config.transport.address


def is_address(run: str) -> bool:
    """Return whether people mean the address of a syncer, rather than the folder of a run."""
    return ":" in run and not Path(run).exists()


def syncer_at(run: str, known: TransportConfig, *, allow_plaintext: bool) -> TransportConfig:
    """Return how to ask the syncer of a run, a folder or host:port; ValueError if the folder holds no address.

    With `allow_plaintext` an address other than loopback is asked although nothing is encrypted.
    """
    plain = allow_plaintext or known.allow_plaintext
    path = Path(run) / ADDRESS_FILE
    if not is_address(run) and not path.exists():
        raise ValueError(f"{run} has no {ADDRESS_FILE}, so its syncer never listened; start the run, or give host:port")
    address = run if is_address(run) else path.read_text(encoding="utf-8").strip()
    split_address(address, "the address" if is_address(run) else str(path))
    return replace(known, address=address, allow_plaintext=plain, connect_timeout_s=ANSWER_TIMEOUT_S)


def read_status(
    run: str, *, allow_plaintext: bool = False, transport: Callable[[], TransportConfig] = TransportConfig
) -> dict[str, Any]:
    """Return the status dict of a run; of a folder, after a look for its processes (`liveness.judge`).

    ValueError if there is no such run, it has not begun, or the address is not allowed; TransportError if nobody
    answered there. `transport` returns certificates and token, for a syncer that asks for them; it is not
    called for a file that is fresh, since a config takes a second to load.
    """

    def ask() -> dict[str, Any]:
        config = syncer_at(run, transport(), allow_plaintext=allow_plaintext)
        answer: dict[str, Any] = clean_all(json.loads(ask_status(config)))
        return answer

    def ask_if_there() -> dict[str, Any] | None:
        with contextlib.suppress(ValueError, OSError):  # TransportError is an OSError
            return ask() or None
        return None

    if is_address(run):
        status = ask()
        if not status:
            raise ValueError(f"the syncer at {run} has just started and knows nothing yet; try again")
        return status
    folder = Path(run)
    path = folder / STATUS_FILE
    try:
        status = read_object(path, "state", "global_step", "learners")
    except OSError as error:
        if (folder / CONFIG_FILE).exists():
            raise ValueError(
                f"the run in {run} has said nothing yet: it is starting, or ended before it began; see {folder / LOGS}"
            ) from error
        raise ValueError(f"{run} has no {STATUS_FILE} ({error.strerror}); give a run's folder or host:port") from error
    return judge(folder, status, ask_if_there)
