"""The laboratory of namespaces counts bytes, keeps its rates, and removes everything after any end."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.expected import BITS, StepBytes, decoupled_bytes, ring_bytes, round_rate, sustained_rate
from lab.network import NAMESPACE_FILES, NAMESPACES, SYNCER, Lab, LabError, RunFailed, Wan, check_root, sweep

from diloco_jax.core.codec import Format, encoded_size

BENCH = Path(__file__).parent
ISLANDS = ["island-0", "island-1"]
PAYLOAD_BYTES = 3_000_000
RECEIVE = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    connection, _ = server.accept()
    data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
print(hashlib.sha256(data).hexdigest())
"""
SEND = """
import random, socket, sys, time
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 7000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
connection.sendall(random.Random(0).randbytes(int(sys.argv[2])))
"""
KILLED = """
import sys, time
from lab.network import Lab, Wan
with Lab(["island-0"], Wan(one_way_s=0.01)) as lab:
    child = lab.spawn("sleeper", "island-0", ["sleep", "1000"])
    print(lab.namespace("island-0"), child.pid, flush=True)
    time.sleep(1000)
"""


def why_not() -> str:
    """Return the reason why a lab cannot be built here; empty if it can."""
    try:
        check_root()
    except LabError as error:
        return str(error)
    name = f"dlprobe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made.stderr


NEEDS_ROOT = pytest.mark.skipif(bool(why_not()), reason=f"network namespaces cannot be made here: {why_not()}")


def left_behind(lab: Lab) -> list[str]:
    own = lab.namespace("")
    folders = [folder for folder in (NAMESPACES, NAMESPACE_FILES) if folder.is_dir()]
    return [path.name for folder in folders for path in folder.iterdir() if path.name.startswith(own)]


def state_of(pid: int) -> tuple[str, str]:
    """Return the name and the state of a process; a missing process counts as a zombie."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except FileNotFoundError:
        return "", "Z"
    return name, rest.split()[0]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(what)


def start_noise(lab: Lab, size: int) -> None:
    """Send from an island to the syncer, which prints the digest of the received bytes."""
    address = lab.address(SYNCER)
    lab.spawn("receive", SYNCER, [sys.executable, "-c", RECEIVE, address], stdout=subprocess.PIPE)
    lab.spawn("send", "island-0", [sys.executable, "-c", SEND, address, size])


def test_other_users_than_root_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="this is user 1000; start it with sudo"):
        Lab(ISLANDS, Wan())


@NEEDS_ROOT
@pytest.mark.parametrize("wan", [Wan(), Wan(rate_bit_s=50e6), Wan(rate_bit_s=50e6, one_way_s=0.02)], ids=str)
def test_bytes_arrive_and_are_counted(wan: Wan) -> None:
    with Lab(ISLANDS, wan) as lab:
        start_noise(lab, PAYLOAD_BYTES)
        seen = lab.output("receive", 60)
        traffic, other = lab.traffic("island-0"), lab.traffic("island-1")
    assert seen.strip() == hashlib.sha256(random.Random(0).randbytes(PAYLOAD_BYTES)).hexdigest()
    assert PAYLOAD_BYTES < traffic.up < 1.5 * PAYLOAD_BYTES, "a busy machine sends some bytes twice"
    assert 0 < traffic.down < 0.1 * PAYLOAD_BYTES
    assert max(other.up, other.down) < 10_000, "neighbour discovery and the like"


@NEEDS_ROOT
def test_a_rate_holds_in_both_directions_and_can_be_changed() -> None:
    def rates() -> list[int]:
        ends = ((lab.namespace("island-1"), "wan"), (lab.namespace("router"), "island-1"))
        words = [["tc", "-n", namespace, "-j", "qdisc", "show", "dev", device] for namespace, device in ends]
        return [json.loads(subprocess.check_output(w))[0]["options"]["rate"] for w in words]

    with Lab(ISLANDS, Wan(rate_bit_s=8e6)) as lab:
        assert rates() == [1_000_000, 1_000_000]
        lab.shape(80e6)
        assert rates() == [10_000_000, 10_000_000]


@NEEDS_ROOT
def test_a_link_that_becomes_narrower_under_load_continues() -> None:
    size = 8 * PAYLOAD_BYTES
    # At this rate packets are large.
    with Lab(ISLANDS, Wan(rate_bit_s=400e6)) as lab:
        start_noise(lab, size)
        lab.wait_for(lambda: lab.traffic("island-0").up > size / 4, 60, "the first quarter")
        lab.shape(30e6)
        assert lab.output("receive", 60)
        assert lab.traffic("island-0").up > 0.9 * size, "bytes of the earlier rate count, too"


@NEEDS_ROOT
def test_the_name_of_the_machine_leads_to_the_site() -> None:
    program = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    with Lab(ISLANDS, Wan()) as lab:
        lab.spawn("name", "island-1", [sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert lab.output("name", 30).strip() == lab.address("island-1")


@NEEDS_ROOT
def test_a_failed_child_ends_the_wait_for_its_result() -> None:
    with Lab(ISLANDS, Wan()) as lab:
        lab.spawn("broken", "island-0", [sys.executable, "-c", "raise SystemExit(3)"])
        with pytest.raises(RunFailed, match="broken ended with status 3 before its answer"):
            lab.wait_for(lambda: False, 30, "its answer")


@NEEDS_ROOT
def test_an_error_leaves_nothing_behind() -> None:
    lab = Lab(ISLANDS, Wan(one_way_s=0.01))
    with pytest.raises(KeyboardInterrupt), lab:
        child = lab.spawn("sleeper", "island-0", ["sleep", "1000"])
        assert left_behind(lab)
        raise KeyboardInterrupt
    assert child.poll() is not None
    assert not left_behind(lab)


@NEEDS_ROOT
def test_the_next_lab_removes_a_killed_one_and_keeps_running_ones() -> None:
    environment = {**os.environ, "PYTHONPATH": str(BENCH)}
    with Lab(ISLANDS, Wan()) as living:
        killed = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, env=environment)
        assert killed.stdout is not None
        with killed.stdout:
            namespace, pid = killed.stdout.readline().decode().split()
        assert (NAMESPACES / namespace).exists()
        # When the child runs "sleep", it has already requested its signal.
        wait_until(lambda: state_of(int(pid))[0] == "sleep", "it does not sleep")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        wait_until(lambda: state_of(int(pid))[1] == "Z", f"process {pid} is still there")
        sweep()
        assert not (NAMESPACES / namespace).exists()
        assert (NAMESPACES / living.namespace(SYNCER)).exists()


@pytest.mark.parametrize("format", BITS)
def test_bits_of_an_element_are_those_of_the_codec(format: Format) -> None:
    elements = 256 * 1000
    assert encoded_size([(elements,)], format) == elements * BITS[format] / 8


def test_a_fragment_travels_each_way_in_a_step() -> None:
    assert decoupled_bytes(24 * 256, 24, "int4", "float32") == StepBytes(132, 1024)


def test_a_ring_of_four_moves_three_halves_of_the_gradient_each_way() -> None:
    assert ring_bytes(1000, 4) == StepBytes(3000, 3000)


def test_at_the_round_rate_a_round_just_fits() -> None:
    step, step_s, overlap_steps, round_trip_s = StepBytes(1000, 1500), 0.1, 2, 0.06
    rate = round_rate(step, step_s, overlap_steps, round_trip_s)
    wait_s, pull_s, broadcast_s = step_s / 2, round_trip_s + 8000 / rate, round_trip_s / 2 + 12000 / rate
    assert wait_s + pull_s + broadcast_s == pytest.approx(overlap_steps * step_s)


def test_a_long_overlap_does_not_help_a_link_that_is_too_narrow() -> None:
    step = StepBytes(1000, 3000)
    assert round_rate(step, 0.1, overlap_steps=50) == sustained_rate(step, 0.1) == 240_000


def test_a_round_trip_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"raise overlap_steps"):
        round_rate(StepBytes(1, 1), 0.1, overlap_steps=2, round_trip_s=0.1)
