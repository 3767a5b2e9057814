"""Measure what continuing a cut payload brings on a narrow link that is cut at intervals.

A learner sends payloads to a syncer through a relay with a limited rate, one after another, and dials again after each
cut. Two learners run at the same time, each with its own relay: one continues payloads, and one starts them again. Each
sends until `--seconds` are over; a payload counts if it has arrived. The ratio is that of both numbers of bytes.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time

from diloco_jax.protocol.messages import Advance, FragmentValue
from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.transport.endpoints.grpc_link import connect, listen
from diloco_jax.transport.link import TransportConfig, TransportError
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.session import assembly, stream

RUN, LEARNER = "cuts-bench", "sender"
WAIT_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload-mb", type=float, nargs="+", default=[10.0, 40.0, 160.0], help="megabytes (10^6)")
    parser.add_argument("--mbit", type=float, default=50.0, help="rate of the link, 10^6 bits per second")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two cuts")
    parser.add_argument("--seconds", type=float, default=270.0, help="length of the measurement for each size")
    parser.add_argument("--json", action="store_true", help="print one JSON object per result and line")
    arguments = parser.parse_args()
    for payload_mb in arguments.payload_mb:
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            jobs = [
                (payload_mb, arguments.mbit, arguments.every, arguments.seconds, resumes) for resumes in (True, False)
            ]
            resumed, restarted = pool.starmap(measure, jobs)
        result = {
            "name": f"payloads of {payload_mb:g} MB that start again after a cut",
            "value": restarted / resumed,
            "unit": "of the bytes that arrive if payloads are continued",
            "continued_mb": resumed,
            "restarted_mb": restarted,
            "link_mb": arguments.mbit / 8 * arguments.seconds,
        }
        line = "{name}: {value:.3f} {unit}, which are {continued_mb:.0f} MB of {link_mb:.0f} MB"
        text = json.dumps(result) if arguments.json else line.format(**result)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def measure(payload_mb: float, mbit: float, every_s: float, seconds: float, resumes: bool) -> float:
    """Return the megabytes of the payloads that arrived."""
    if not resumes:
        # The sender gives no payload a key, and so no side can continue one.
        for module in (assembly, stream):
            module.RESUME_BYTES_MIN = sys.maxsize  # type: ignore[attr-defined]
    config = TransportConfig(address="127.0.0.1:0", stripes=1)
    listener, over = listen(config, run_id=RUN), threading.Event()
    threading.Thread(target=answer, args=(listener, over), daemon=True).start()
    payload, partials, arrived = os.urandom(round(payload_mb * 1e6)), Partials(config.payload_bytes_max, 120.0), 0
    with Relay(listener.address) as relay:
        relay.change(bytes_per_s=mbit / 8 * 1e6)
        dialled = TransportConfig(address=relay.address, stripes=1)
        until_s = time.monotonic() + seconds
        threading.Thread(target=cut, args=(relay, every_s, over), daemon=True).start()
        while time.monotonic() < until_s:
            with contextlib.suppress(TransportError):
                link = connect(dialled, run_id=RUN, learner_id=LEARNER, incarnation=1, partials=partials)
                arrived = send(link, payload, arrived, until_s)
    over.set()
    listener.close(0.0)
    return arrived * payload_mb


def answer(listener, over: threading.Event) -> None:  # type: ignore[no-untyped-def]
    """Confirm every payload with the number of its step."""
    while not over.is_set():
        delivery = listener.receive(WAIT_S)
        if delivery is not None and isinstance(delivery.message, FragmentValue):
            listener.send(delivery.peer, Advance(delivery.message.global_step))


def cut(relay: Relay, every_s: float, over: threading.Event) -> None:
    while not over.wait(every_s):
        relay.cut()


def send(link, payload: bytes, arrived: int, until_s: float) -> int:  # type: ignore[no-untyped-def]
    """Send payloads until the link is lost or the time is over; return the number of those that arrived so far."""
    while True:
        link.send(FragmentValue(LEARNER, 1, arrived + 1, 0, 1, 1, 1, 0, len(payload), 1), payload)
        while True:
            delivery = link.receive(WAIT_S)
            if delivery is not None and delivery.kind != "message":
                return arrived
            if time.monotonic() >= until_s:
                link.close(0.0)
                return arrived
            if delivery is not None and isinstance(delivery.message, Advance):
                arrived = max(arrived, delivery.message.global_step)
                break


if __name__ == "__main__":
    main()
