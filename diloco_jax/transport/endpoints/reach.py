"""The wait of a process that starts for a syncer to listen: it says at once what the system says of an address.

gRPC tries again in silence, so a wrong address would be noticed only when its time is over. Nothing is sent here: a
connection is opened and closed.
"""

import os
import socket
import threading
import time
from collections.abc import Callable

from diloco_jax.transport.link import TransportConfig, TransportError, split_address
from diloco_jax.transport.trust.security import is_loopback

REACH_S = 2.0  # for one attempt
AGAIN_S = 0.2  # until the next one
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # through one of these gRPC may reach what a socket does not


def await_listener(
    config: TransportConfig, setting: str, say: Callable[[str], object], stop: threading.Event | None = None
) -> None:
    """Return once somebody listens at `config.address`, or `stop` is set.

    Args:
        setting: what the user gave the address with, such as --syncer.
        say: gets one line at the first attempt that fails: a syncer may just be starting.

    Raises:
        ValueError: the address is none.
        TransportError: nobody listened there for `config.connect_timeout_s`.
    """
    host, port = split_address(config.address, setting)
    if not is_loopback(config.address) and any(os.environ.get(name) for name in PROXIES):
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


def _trouble(host: str, port: int, timeout_s: float) -> str:
    """Try once to connect; return why it failed, "" if it did not."""
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
