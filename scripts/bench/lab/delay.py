"""One link with a delay: `delay.py NAMESPACE:DEVICE NAMESPACE:DEVICE SECONDS` runs until it is killed.

It makes two TUN devices, each in its namespace, and carries packets from one to the other SECONDS later. The kernel
handles rates and queues (tbf on the devices). Packets have a virtio header and up to 64 KiB, as the kernel's
segmentation offload makes them for any MTU. So one process carries gigabits.
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
# The packets that are read from one side before the other has its turn.
BATCH_PACKETS = 64
# The limit of bytes in flight in one direction; further packets are dropped.
BACKLOG_BYTES_MAX = 64 << 20


def open_device(place: str) -> int:
    """Make a TUN device at "namespace:device", and return its file descriptor."""
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
        """Read the packets that have arrived."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(BATCH_PACKETS):
                packet = os.read(self.source, READ_BYTES)
                if self._bytes < BACKLOG_BYTES_MAX:
                    self._packets.append((time.monotonic() + self._delay_s, packet))
                    self._bytes += len(packet)

    def give(self, now_s: float) -> float:
        """Write the packets that are due, and return the time of the next one."""
        packets = self._packets
        while packets and packets[0][0] <= now_s:
            packet = packets.popleft()[1]
            self._bytes -= len(packet)
            # Packets are lost while the device is not up yet.
            with contextlib.suppress(OSError):
                os.write(self._target, packet)
        return packets[0][0] if packets else now_s + 1.0


def main() -> None:
    here, there, delay = sys.argv[1:]
    a, b = open_device(here), open_device(there)
    directions = {a: Direction(a, b, float(delay)), b: Direction(b, a, float(delay))}
    # This program has no cyclic objects, and a collection would pause it.
    gc.disable()
    print("ready", flush=True)
    while True:
        now_s = time.monotonic()
        next_s = min(direction.give(now_s) for direction in directions.values())
        readable, _, _ = select.select(list(directions), [], [], max(0.0, next_s - time.monotonic()))
        for fd in readable:
            directions[fd].take()


if __name__ == "__main__":
    main()
