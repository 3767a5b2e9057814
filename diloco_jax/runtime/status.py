"""Ask for the status of a run, by its folder or by its syncer's address."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco_jax.runtime.files import STATUS_FILE
from diloco_jax.transport.grpc_link import ask_status
from diloco_jax.transport.link import TransportConfig

ANSWER_TIMEOUT_S = 5.0


def read_status(run: str, *, allow_plaintext: bool = False) -> dict[str, Any]:
    """The status dict of a run.

    Args:
        run: the run's folder, or host:port of its syncer.
        allow_plaintext: ask an address other than loopback although nothing is encrypted.

    Raises:
        ValueError: there is no such run, it has not begun, or the address is not allowed.
        TransportError: nobody answered at the address.
    """
    if ":" in run and not Path(run).exists():
        config = TransportConfig(address=run, connect_timeout_s=ANSWER_TIMEOUT_S, allow_plaintext=allow_plaintext)
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
