"""One link with a delay, for network: `delay.py NAMESPACE:DEVICE NAMESPACE:DEVICE SECONDS`, until it is killed.

Makes two TUN devices, each in its namespace, and carries packets from one to the other SECONDS later. Rates and queues
are the kernel's business (tbf on the devices). Packets come with a virtio header and up to 64 KiB at a time, as the
kernel's segmentation offload makes them, whatever the MTU: so one process carries gigabits.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import struct
import sys
import time
from collections import deque

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
READ_BYTES = (64 << 10) + 128
BATCH_PACKETS = 64  # read from one side before the other has its turn
BACKLOG_BYTES_MAX = 64 << 20  # under way in one direction; what comes on top is dropped


def open_device(place: str) -> int:
    """Make a TUN device at "namespace:device"; returns its file descriptor."""
    namespace, device = place.split(":")
    with open(f"/run/netns/{namespace}", encoding="utf-8") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return fd


class Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source, self._target, self._delay_s = source, target, delay_s
        self._packets: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def take(self) -> None:
        """Read what came."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(BATCH_PACKETS):
                packet = os.read(self.source, READ_BYTES)
                if self._bytes < BACKLOG_BYTES_MAX:
                    self._packets.append((time.monotonic() + self._delay_s, packet))
                    self._bytes += len(packet)

    def give(self, now_s: float) -> float:
        """Write what is due; returns when the next packet is."""
        packets = self._packets
        while packets and packets[0][0] <= now_s:
            packet = packets.popleft()[1]
            self._bytes -= len(packet)
            with contextlib.suppress(OSError):  # the device is not up yet: lost
                os.write(self._target, packet)
        return packets[0][0] if packets else now_s + 1.0


def main() -> None:
    here, there, delay = sys.argv[1:]
    a, b = open_device(here), open_device(there)
    directions = {a: Direction(a, b, float(delay)), b: Direction(b, a, float(delay))}
    gc.disable()  # nothing here is cyclic, and a collection is a pause
    print("ready", flush=True)
    while True:
        now_s = time.monotonic()
        next_s = min(direction.give(now_s) for direction in directions.values())
        readable, _, _ = select.select(list(directions), [], [], max(0.0, next_s - time.monotonic()))
        for fd in readable:
            directions[fd].take()


if __name__ == "__main__":
    main()
