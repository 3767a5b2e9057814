"""The wait of a starting process for its syncer, with the system's error for a wrong address.

gRPC retries in silence, so a wrong address would be noticed only after the timeout. This module opens and closes a
connection, and sends nothing.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from diloco_jax.transport.link import TransportConfig, TransportError, bucket_scheme, check_address, split_address
from diloco_jax.transport.store.bucket import Bucket
from diloco_jax.transport.store.requests import await_leader
from diloco_jax.transport.store.store import StoreError
from diloco_jax.transport.trust.security import proxy_of

REACH_S = 2.0  # one attempt
AGAIN_S = 0.2  # between attempts


def await_listener(
    config: TransportConfig, setting: str, say: Callable[[str], object], stop: threading.Event | None = None
) -> None:
    """Wait until a process listens at `config.address`, or `stop` is set.

    Args:
        setting: The option that gave the address, such as --syncer.
        say: Gets one line at the first failed attempt, because a syncer may just be starting.

    Raises:
        ValueError: This is not an address.
        TransportError: Nobody listened there for `config.connect_timeout_s`.
    """
    if bucket_scheme(config.address):
        _await_leader(config, setting, say, stop)
        return
    host, port = split_address(config.address, setting)
    # The proxy may reach an address that a socket cannot reach.
    if proxy_of(config.address):
        return
    timeout_s, stop = config.connect_timeout_s, stop or threading.Event()
    ends_s, said = time.monotonic() + timeout_s, False
    while not stop.is_set():
        left_s = ends_s - time.monotonic()
        trouble = _trouble(host, port, min(REACH_S, max(0.1, left_s)))
        if not trouble:
            return
        if not said:
            say(f"{setting} is {config.address}, and {trouble}; waiting up to {timeout_s:g} s for the syncer to start")
            said = True
        if left_s <= AGAIN_S:
            raise TransportError(
                f"no syncer answered at {config.address} within {timeout_s:g} s ({trouble}): start it, correct "
                f"{setting}, or raise transport.connect_timeout_s"
            )
        stop.wait(AGAIN_S)


def _await_leader(
    config: TransportConfig, setting: str, say: Callable[[str], object], stop: threading.Event | None
) -> None:
    """Wait until a syncer leads the run in a bucket; raises as `await_listener`."""
    check_address(config.address, setting)
    bucket, over = Bucket(config), stop or threading.Event()
    found = None
    # An unreachable store is reported at the end of the wait.
    with contextlib.suppress(StoreError):
        found = bucket.leader()
    if found is None:
        say(f"no syncer is at {config.address} yet; waiting up to {config.connect_timeout_s:g} s for it to start")
        await_leader(bucket, time.monotonic() + config.connect_timeout_s, over.is_set)


def _trouble(host: str, port: int, timeout_s: float) -> str:
    """Try once to connect; return the error, "" if it worked."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except socket.gaierror as error:
        return f"the name {host} is not known here ({error.strerror})"
    except TimeoutError:
        return f"nobody answered there within {timeout_s:.2g} s"
    except ConnectionRefusedError:
        return "nobody listens there (connection refused)"
    except OSError as error:
        return f"it cannot be reached ({error.strerror or error})"
    return ""
