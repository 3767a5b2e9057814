"""Measure the rate of payloads from the leader of an island to another host, two processes on this machine.

To compare two commits, run it in turn with the PYTHONPATH of each. `value` is the rate from the first arrived payload
to the last one; `cpu_s` is the processor time of the leader's process.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from diloco_jax.transport.commands import HostAnswer, HostHave
from diloco_jax.transport.group.group import GroupLeader, GroupMember, group_config
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.trust import certificates

RUN, ISLAND, HOSTS = "hosts-bench", "island-0", 2
WAIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload-mb", type=float, default=64.0, help="megabytes (10^6) of one payload")
    parser.add_argument("--payloads", type=int, default=12, help="payloads after the first one")
    parser.add_argument("--tls", action="store_true", help="encrypt the connections")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.tls:
            certificates.make(Path(folder), [ISLAND])
        result = measure(round(arguments.payload_mb * 1e6), arguments.payloads, folder if arguments.tls else "")
    line = "{name}: {value:.0f} {unit}, processor time of the leader {cpu_s:.2f} s".format(**result)
    sys.stdout.write(f"{json.dumps(result) if arguments.json else line}\n")


def config_of(address: str, folder: str) -> TransportConfig:
    config = TransportConfig()
    if folder:
        files = {"tls_certificate": f"{folder}/{{name}}.pem", "tls_key": f"{folder}/{{name}}.key"}
        config = replace(config, tls_ca=f"{folder}/ca.pem", **files)  # type: ignore[arg-type]
    return group_config(config, address)


def measure(payload_bytes: int, payloads: int, folder: str) -> dict[str, object]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    member = multiprocessing.get_context("spawn").Process(target=receive, args=(there, folder, payloads), daemon=True)
    member.start()
    leader = GroupLeader(config_of("127.0.0.1:0", folder), RUN, ISLAND, HOSTS)
    here.send((leader.address, leader.number))
    if leader.receive(WAIT_S) is None:
        raise ConnectionError(f"the host did not join within {WAIT_S:g} s")
    payload = os.urandom(payload_bytes)
    for _ in range(1 + payloads):
        leader.send(HostHave("x"), payload)
    seconds = here.recv()
    used = os.times()
    leader.close(0.0)
    member.join(WAIT_S)
    return {
        "name": "leader to host" + ", TLS" * bool(folder),
        "value": payloads * payload_bytes / 1e6 / seconds,
        "unit": "MB/s",
        "cpu_s": used.user + used.system,
    }


def receive(pipe: Connection, folder: str, payloads: int) -> None:
    """Join the leader, and send back in how many seconds all payloads after the first one arrived."""
    address, number = pipe.recv()
    member = GroupMember(config_of(address, folder), RUN, ISLAND, 1, HOSTS, number)
    member.send(HostAnswer(0))
    began_s = 0.0
    for _ in range(1 + payloads):
        item = member.receive(WAIT_S)
        if item is None or item.message is None:
            raise ConnectionError("no payload arrived" if item is None else item.reason)
        began_s = began_s or time.perf_counter()
    pipe.send(time.perf_counter() - began_s)
    member.close(1.0)


if __name__ == "__main__":
    main()
