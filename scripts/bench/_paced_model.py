"""A small model for `diloco train` whose steps take at least `step_s` seconds, for vs_torchft.

Three islands of a benchmark share two cores, so a step that computes for 20 ms would measure the cores. This model
computes for a few milliseconds and sleeps in `Island.wait`, outside of the compiled program, so that compilation and
caching stay as usual.

If DILOCO_BENCH_EVENTS names a folder, each process writes PID.jsonl there, with `t` in seconds of the system's clock:
imported (with the command and the start of the process), traced (the loss), compiled (any program), step (it ended).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from diloco_jax.training.island import Island, StepHandle

EVENTS_ENV = "DILOCO_BENCH_EVENTS"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
STEPS_SHOWN = 100


class EventFile:
    """File of this process's events with their times; it needs the environment variable."""

    def __init__(self) -> None:
        folder = os.environ.get(EVENTS_ENV)
        self._path = Path(folder) / f"{os.getpid()}.jsonl" if folder else None
        self._lock = threading.Lock()

    def emit(self, event: str, **facts: object) -> None:
        if self._path is None:
            return
        line = json.dumps({"t": time.time(), "event": event, "thread": threading.get_ident(), **facts})
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


EVENTS = EventFile()


def _started_s() -> float:
    """Return the start of this process on the system's clock."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _island_number() -> int:
    """Return the number at the end of the name of this process's island; 0 without an island."""
    return int(sys.argv[sys.argv.index("--island") + 1].rpartition("-")[2]) if "--island" in sys.argv else 0


def _on_duration(event: str, duration_s: float, **_: object) -> None:
    if event == COMPILE_EVENT:
        EVENTS.emit("compiled", duration_s=duration_s)


class Pacer:
    """Replacement of `Island.wait` that returns at least `step_s` after its previous return."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._next_s = 0.0
        self._steps = 0
        self._wait = Island.wait

    def __call__(self, island: Island, handle: StepHandle) -> dict[str, float]:
        metrics = self._wait(island, handle)
        self._steps += 1
        if self._steps <= STEPS_SHOWN:
            EVENTS.emit("step", number=self._steps)
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + self.step_s
        return metrics


EVENTS.emit("imported", command=sys.argv, started=_started_s())
jax.monitoring.register_event_duration_secs_listener(_on_duration)
PACER = Pacer()
Island.wait = lambda island, handle: PACER(island, handle)  # type: ignore[method-assign]


class PacedModel(nnx.Module):
    """Model of the next byte: an embedding, two matrices with a ReLU between them, and a head."""

    def __init__(
        self, *, vocab_size: int, dim: int, mlp_dim: int, step_s: float, spread: float = 0.0, rngs: nnx.Rngs
    ) -> None:
        init = nnx.initializers.lecun_normal()
        shapes = {"embed": (vocab_size, dim), "up": (dim, mlp_dim), "down": (mlp_dim, dim), "head": (dim, vocab_size)}
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(init(rngs.params(), shape, jnp.float32)))
        PACER.step_s = step_s * (1 + spread * _island_number())

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> PacedModel:
        return cls(**args, rngs=rngs)

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        EVENTS.emit("traced")
        tokens = batch["tokens"]
        x = self.embed[...][tokens[:, :-1]]
        x = nnx.relu(x @ self.up[...]) @ self.down[...]
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ self.head[...], tokens[:, 1:])
        return losses.mean(), {}
