"""The status of a run: what the syncer says of itself, and how to ask for it. live.py describes the keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.stats import RunStats
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.runtime.files import ADDRESS_FILE, STATUS_FILE
from diloco_jax.runtime.settings import RunConfig
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.questions import ask_status

ANSWER_TIMEOUT_S = 5.0


def compose_status(
    run: str,
    syncer: Syncer,
    stats: RunStats,
    now_s: float,
    *,
    stopped: bool,
    alarms: Sequence[str],
    eval_loss: float | None,
    wire: Mapping[str, int],
) -> dict[str, Any]:
    """What the run does now, for `diloco status` and the live view.

    Args:
        run: its name.
        syncer: its machine.
        stats: what was counted.
        now_s: the run's clock.
        stopped: whether somebody ended it early.
        alarms: what is wrong with the syncer itself, such as a full disk; the first is what everybody waits for.
        eval_loss: newest evaluation.
        wire: bytes moved.
    """
    learners = stats.status(now_s)
    state = "complete" if syncer.finished else "running" if stats.tokens else "starting"
    return {
        "run": run,
        "state": "stopped" if stopped else state,
        "global_step": syncer.global_step,
        "total_steps": syncer.total_steps,
        "epoch": syncer.epoch,
        "waiting_for": alarms[0] if alarms else syncer.waiting_for(now_s),
        "alarms": list(alarms),
        "wall_s": round(now_s, 1),
        "tokens": stats.tokens,
        "tokens_per_s": round(sum(row["tokens_per_s"] for row in learners), 1),
        "eval_loss": eval_loss,
        "contributors_per_round": round(stats.contributors_per_round, 3),
        "wire": dict(wire),
        "learners": learners,
    }


class Earlier(NamedTuple):
    """What only the status of an earlier process tells: up to half a second old, and good enough for people."""

    wire: dict[str, int]
    eval_loss: float | None


def read_earlier(run_dir: Path) -> Earlier:
    """What the last process that wrote this folder's status had counted; zeros when that cannot be read."""
    try:
        status = json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))
        wire = {key: int(status["wire"][key]) for key in ("up_bytes", "down_bytes")}
        return Earlier(wire, status["eval_loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return Earlier({"up_bytes": 0, "down_bytes": 0}, None)


def complete(run_dir: Path) -> bool:
    """Whether the syncer has said that every round of the run is done; its last evaluation may still be going on."""
    try:
        state = json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(state == "complete")


def known_address(run_dir: Path, config: RunConfig) -> str:
    """Where the syncer of a run listens: as its folder says, if it is on this machine, else as the config does."""
    told = run_dir / ADDRESS_FILE
    return told.read_text(encoding="utf-8").strip() if told.exists() else config.transport.address


def is_address(run: str) -> bool:
    """Whether people mean the address of a syncer, rather than the folder of a run."""
    return ":" in run and not Path(run).exists()


def syncer_at(run: str, known: TransportConfig, *, allow_plaintext: bool) -> TransportConfig:
    """How to ask the syncer of a run.

    Args:
        run: the run's folder, or host:port of its syncer.
        known: certificates and token.
        allow_plaintext: ask an address other than loopback although nothing is encrypted.

    Raises:
        ValueError: the folder holds no address.
    """
    plain = allow_plaintext or known.allow_plaintext
    path = Path(run) / ADDRESS_FILE
    if not is_address(run) and not path.exists():
        raise ValueError(f"{run} has no {ADDRESS_FILE}, so its syncer never listened; start the run, or give host:port")
    address = run if is_address(run) else path.read_text(encoding="utf-8").strip()
    return replace(known, address=address, allow_plaintext=plain, connect_timeout_s=ANSWER_TIMEOUT_S)


def read_status(run: str, *, allow_plaintext: bool = False, transport: TransportConfig | None = None) -> dict[str, Any]:
    """The status dict of a run.

    Args:
        run: the run's folder, or host:port of its syncer.
        allow_plaintext: ask an address other than loopback although nothing is encrypted.
        transport: certificates and token, for an address whose syncer asks for them.

    Raises:
        ValueError: there is no such run, it has not begun, or the address is not allowed.
        TransportError: nobody answered at the address.
    """
    if is_address(run):
        config = syncer_at(run, transport or TransportConfig(), allow_plaintext=allow_plaintext)
        status: dict[str, Any] = json.loads(ask_status(config))
        if not status:
            raise ValueError(f"the syncer at {run} has just started and knows nothing yet; try again")
        return status
    path = Path(run) / STATUS_FILE
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{run} has no {STATUS_FILE} ({error.strerror}); give a run's folder or host:port") from error
    except ValueError as error:
        raise ValueError(f"{path} is not readable ({error}); try again") from error
    return status
