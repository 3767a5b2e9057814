"""Measure the slowdown of a donor's steps while it gives its state away.

Blocks of steps without a transfer alternate with blocks that send one state after another, as fast as the donor can.
The receiver is another process, on other cores if possible. `value` is the median ratio of the mean step times over all
pairs of blocks. `cpu_value` is the same ratio for the process's processor time per step, which other load on the
machine does not change.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import pairs as blocks

RUN, DONOR, RECEIVER = "donor-bench", "donor", "receiver"
PARTS_IN_FLIGHT = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="emulated devices of the donor")
    parser.add_argument(
        "--format", choices=("float32", "bfloat16", "int8"), default="float32", help="format of moments"
    )
    blocks.add_options(parser, batch_size=4, pairs=7, steps=20)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    blocks.emulate(arguments.devices)
    here, there = multiprocessing.get_context("spawn").Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(there, cores[-half:]), daemon=True)
    receiver.start()
    os.sched_setaffinity(0, cores[:half])
    result = measure(arguments, here.recv())
    receiver.terminate()
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(
        f"donor's step time while it gives its state ({result['state_bytes'] / 1e6:.0f} MB at "
        f"{result['bytes_per_s'] / 1e6:.0f} MB/s): x {result['value']:.3f} of {1000 * result['step_s']:.1f} ms "
        f"({result['low']:.3f} to {result['high']:.3f}, {result['runs']} pairs); "
        f"processor time x {result['cpu_value']:.3f}\n"
    )


def receive(pipe: Connection, cores: list[int]) -> None:
    """Run as syncer and receiver in one process, and request one part after another, forever."""
    os.sched_setaffinity(0, cores)
    from diloco_jax.protocol.messages import StateChunk, StatePull
    from diloco_jax.transport.endpoints.grpc_link import listen
    from diloco_jax.transport.link import TransportConfig

    listener = listen(TransportConfig(), run_id=RUN)
    pipe.send(listener.address)
    # The pipe becomes readable after any end of the donor's process.
    while not pipe.poll():
        delivery = listener.receive(1.0)
        if delivery is None or not isinstance(delivery.message, StateChunk):
            # A heartbeat means that the donor has a new state.
            if delivery is not None and delivery.message is not None:
                for part in range(PARTS_IN_FLIGHT):
                    listener.send(DONOR, StatePull(RECEIVER, 0, 1, part))
            continue
        came = delivery.message
        following = came.part + PARTS_IN_FLIGHT
        if following < came.parts:
            listener.send(DONOR, StatePull(RECEIVER, 0, 1, following))
        elif came.part == came.parts - 1:
            # The state is complete, so the receiver requests another one.
            listener.send(DONOR, StatePull(RECEIVER, 0, 0, 0))


class Donor:
    """An island in this process that trains, and gives its state to the listener at an address."""

    def __init__(self, arguments: argparse.Namespace, address: str) -> None:
        import numpy as np

        from diloco_jax.runtime.island.payloads import PayloadSender
        from diloco_jax.training.island import Island
        from diloco_jax.training.models.config import ModelConfig
        from diloco_jax.training.optimizers import OptimizerConfig
        from diloco_jax.training.sharding import MeshConfig
        from diloco_jax.training.whole_state.moving import MovingLayout
        from diloco_jax.transport.endpoints.grpc_link import connect
        from diloco_jax.transport.link import TransportConfig

        self.island = Island(
            ModelConfig(args=blocks.decoder_args(arguments)), OptimizerConfig(), MeshConfig(data=-1), seed=0
        )
        shape = (arguments.batch_size, arguments.seq_len + 1)
        self._batch = {"tokens": np.random.default_rng(0).integers(0, 256, shape, np.int32)}
        self.island.warm_up(self._batch)
        self._link = connect(TransportConfig(address=address), run_id=RUN, learner_id=DONOR, incarnation=1)
        self._sender = PayloadSender(lambda error: sys.stderr.write(f"{error!r}\n"))
        self._layout = MovingLayout(self.island.state_layout, arguments.format)
        self.state_bytes = self._layout.bytes.num_bytes
        self._staged: list[Any] = []
        # While it is set, the next step makes a new copy of the state.
        self.wanted = threading.Event()
        self.sent_bytes = 0
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        from diloco_jax.protocol.messages import StateChunk, StatePull

        while True:
            delivery = self._link.receive(1.0)
            if delivery is None or not isinstance(delivery.message, StatePull):
                continue
            if not delivery.message.donor_step:
                self.wanted.set()
            elif self._staged:
                part = StateChunk(DONOR, 1, RECEIVER, 1, delivery.message.part, 0, 0, 0)
                self.sent_bytes += min(1 << 20, self._layout.bytes.num_bytes - (part.part << 20))
                self._sender.part(self._link, part, self._staged[0])

    def train(self, steps: int, *, giving: bool) -> blocks.Costs:
        """Train a block, and return the mean costs of a step."""
        from diloco_jax.protocol.messages import Heartbeat
        from diloco_jax.training.whole_state.moving import MovingState

        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.island.wait(self.island.step(self.island.put_batch(self._batch), 1e-3))
            if giving and self.wanted.is_set():
                self.wanted.clear()
                self._staged[:] = [MovingState(self._layout, self.island.stage_moments().leaf)]
                self._link.send(Heartbeat(DONOR, 1))
        cpu_s = time.process_time() - began_cpu_s
        return blocks.Costs((time.perf_counter() - began_s) / steps, cpu_s / steps)


def measure(arguments: argparse.Namespace, address: str) -> dict[str, object]:
    """Run all pairs of blocks in this process."""
    donor = Donor(arguments, address)
    donor.train(arguments.steps, giving=False)
    donor.wanted.set()
    pairs, rates = list[blocks.Pair](), list[float]()
    for _ in range(arguments.pairs):
        alone = donor.train(arguments.steps, giving=False)
        began_bytes, began_s = donor.sent_bytes, time.perf_counter()
        giving = donor.train(arguments.steps, giving=True)
        rates.append((donor.sent_bytes - began_bytes) / (time.perf_counter() - began_s))
        # The next block alone starts when the present transfer has ended.
        donor.wanted.wait()
        pairs.append(blocks.Pair(giving, alone))
    return blocks.summary(
        "donor",
        "step time while giving / step time alone",
        pairs,
        state_bytes=donor.state_bytes,
        bytes_per_s=statistics.median(rates),
        devices=arguments.devices,
    )


if __name__ == "__main__":
    main()
