"""A whole model whose shares are in processes of their own, the merge shards, on this host.

This process owns them: it starts them, says over a pipe what to do, and ends with an error when one of them ends; they
end when the pipe does. Of learners' values and of versions that go out it knows numbers and sizes only. What waits in
a shard for this process is freed when nobody here refers to it any more.
"""

from __future__ import annotations

import itertools
import logging
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.passes import Flat, State
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment
from diloco_jax.runtime.model.arithmetic import Bytes, LocalShares, Outcome, Setup, Squares
from diloco_jax.runtime.model.shard_pipe import Frame, Pipe, pack_state, unpack_state

MERGE_SHARD = "merge-shard"  # the command that runs one
LISTEN_PATIENCE_S = 30.0  # how long a shard may wait for the port of the one before it
LISTEN_RETRY_S = 0.5
END_S = 5.0

log = logging.getLogger(__name__)


class Proxy:
    """One merge shard, as its owner sees it.

    Args:
        shard: which share of the model.
        config_path: the run's config file.
        on_event: gets what the shard says unasked, on a thread of its own.
        on_death: gets the error when the shard is gone, there too.
    """

    def __init__(
        self,
        shard: int,
        config_path: Path,
        on_event: Callable[[int, Mapping[str, Any]], None],
        on_death: Callable[[Exception], None],
    ) -> None:
        self.shard = shard
        self._on_event = on_event
        self._on_death = on_death
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Frame]] = {}
        self._numbers = itertools.count()
        self._death: Exception | None = None
        self._ending = False
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "diloco_jax", MERGE_SHARD, str(config_path)]
        words = ["--shard", str(shard), "--connection", str(theirs.fileno())]
        self.process = subprocess.Popen([*command, *words], pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe = Pipe(ours, self._on_frame, self._on_end)
        self._pipe.start()

    def tell(self, op: str, arrays: Sequence[np.ndarray] = (), **said: Any) -> None:
        """Give a command without an answer; any thread."""
        self._pipe.send({"op": op, **said}, arrays)

    def ask(self, op: str, arrays: Sequence[np.ndarray] = (), **said: Any) -> Future[Frame]:
        """Give a command with an answer; any thread. The future raises ConnectionError when the shard is gone."""
        future: Future[Frame] = Future()
        with self._lock:
            if self._death is not None:
                raise self._death
            number = next(self._numbers)
            self._calls[number] = future
        self._pipe.send({"op": op, "call": number, **said}, arrays)
        return future

    def end(self) -> None:
        """Ask it to end, wait a little, then kill it."""
        self._ending = True
        self.tell("end")
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._pipe.close(0.1)

    def _on_frame(self, frame: Frame) -> None:
        if frame.head["op"] != "reply":
            self._on_event(self.shard, frame.head)
            return
        with self._lock:
            future = self._calls.pop(frame.head["call"])
        if "error" in frame.head:
            future.set_exception(ValueError(f"merge shard {self.shard}: {frame.head['error']}"))
        else:
            future.set_result(frame)

    def _on_end(self, reason: str) -> None:
        error = ConnectionError(
            f"merge shard {self.shard} (process {self.process.pid}) is gone ({reason}); its words are in this log, and "
            "the syncer must be started again"
        )
        with self._lock:
            self._death = error
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(error)
        if not self._ending:
            self._on_death(error)


class HeldPart:
    """A part of a learner's value that a shard keeps until nobody here refers to it.

    Args:
        proxy: of the shard.
        number: by which the shard knows it.
        size: in bytes.
    """

    def __init__(self, proxy: Proxy, number: int, size: int) -> None:
        self.number = number
        self.size = size
        weakref.finalize(self, proxy.tell, "free", number=number).atexit = False


HeldValue = Mapping[int, HeldPart]  # by shard


class RemoteMoment:
    """A moment that the shards captured, kept until nobody refers to it.

    Args:
        setup: of the model.
        proxies: of the shards.
        capture: its number.
    """

    def __init__(self, setup: Setup, proxies: Sequence[Proxy], capture: int) -> None:
        self._setup = setup
        self._proxies = proxies
        self._capture = capture
        for proxy in proxies:
            proxy.tell("capture", capture=capture)
            weakref.finalize(self, proxy.tell, "release", capture=capture).atexit = False

    def states(self) -> list[State]:
        """See Moment.states."""
        parts = self._fetch(values_only=False)
        return [self._setup.join(number, each) for number, each in enumerate(parts)]

    def values(self) -> list[Flat]:
        """See Moment.values."""
        parts = self._fetch(values_only=True)
        values = [{shard: part.value for shard, part in each.items()} for each in parts]
        return [self._setup.shares.join(number, each) for number, each in enumerate(values)]

    def _fetch(self, *, values_only: bool) -> list[dict[int, State]]:
        asked = [proxy.ask("fetch", capture=self._capture, values_only=values_only) for proxy in self._proxies]
        found: list[dict[int, State]] = [{} for _ in self._setup.shares.wholes]
        for shard, answer in enumerate(asked):
            head, arrays = answer.result()
            start = 0
            for name, count in head["counts"].items():
                own = arrays[start : start + count]
                start += count
                empty = [np.empty(0, np.float32)] if values_only else []
                found[int(name)][shard] = unpack_state(head["names"][name], own + empty)
        return found


class RemoteShares:
    """A whole model in processes of their own. Values are HeldValues, which a ShardedListener makes.

    Args:
        setup: of the model.
        plan: from which every shard makes the same setup.
        config_path: the run's config file.
        threads: that all merges together may use.
        on_death: gets the error when a shard is gone, on another thread.
    """

    def __init__(
        self,
        setup: Setup,
        plan: FragmentPlan,
        config_path: Path,
        threads: int,
        on_death: Callable[[Exception], None],
    ) -> None:
        self.setup = setup
        self.on_event: Callable[[int, Mapping[str, Any]], None] = lambda shard, said: None
        self._captures = itertools.count()
        self.proxies = [Proxy(shard, config_path, self._event, on_death) for shard in range(setup.shares.count)]
        shapes = {path: list(shape) for path, shape in plan.shapes.items()}
        kinds = {path: list(kind) for path, kind in plan.kinds.items()}
        for proxy in self.proxies:
            proxy.tell("begin", shapes=shapes, kinds=kinds, threads=max(1, threads // setup.shares.count))

    def _event(self, shard: int, said: Mapping[str, Any]) -> None:
        self.on_event(shard, said)

    def _holders(self, fragment_id: int) -> list[Proxy]:
        return [self.proxies[shard] for shard in self.setup.shares.holders(fragment_id)]

    def listen(self, address: str, epoch: int, stop: threading.Event) -> tuple[str, ...]:
        """Let all shards listen; returns ":port" of each.

        Args:
            address: of the control process; with a port of its own, shards take the ports after it.
            epoch: which life of the syncer it is.
            stop: set from outside to give up.

        Raises:
            ValueError: a port is in use, or the address is not allowed.
        """
        host, _, port = address.rpartition(":")
        until_s, found = time.monotonic() + LISTEN_PATIENCE_S, []
        for proxy in self.proxies:
            own = f"{host}:{int(port) + 1 + proxy.shard if int(port) else 0}"
            while True:
                try:
                    answer = proxy.ask("listen", address=own, epoch=epoch).result()
                    break
                except ValueError:
                    if time.monotonic() >= until_s or stop.wait(LISTEN_RETRY_S):
                        raise
            found.append(":" + answer.head["address"].rpartition(":")[2])
        return tuple(found)

    def send(self, peer: str, message: GlobalFragment) -> None:
        """Let the shards send a version to a learner, as the message says."""
        for proxy in self._holders(message.fragment_id):
            proxy.tell("send", peers=[peer], message=list(message))

    def unusable(self, fragment_id: int, value: HeldValue) -> str:
        """See Arithmetic.unusable."""
        shares = self.setup.shares
        layouts = {shard: shares.parts[shard][fragment_id] for shard in shares.holders(fragment_id)}
        expected = {shard: layout.payload_bytes(self.setup.up) for shard, layout in layouts.items()}
        found = {shard: part.size for shard, part in value.items()}
        return "" if found == expected else f"its parts have {found} bytes, where {expected} are expected"

    def inspect(self, fragment_id: int, values: Sequence[HeldValue], bases: Sequence[int]) -> Squares:
        """See Arithmetic.inspect."""
        asked = []
        for proxy in self._holders(fragment_id):
            numbers = [value[proxy.shard].number for value in values]
            asked.append(proxy.ask("inspect", fragment=fragment_id, numbers=numbers, bases=list(bases)))
        return np.concatenate([answer.result().arrays[0] for answer in asked], axis=1)

    def update(self, fragment_id: int, version: int, chosen: Sequence[int], weights: np.ndarray) -> Outcome:
        """See Arithmetic.update."""
        holders = self._holders(fragment_id)
        asked = [
            proxy.ask("update", [weights], fragment=fragment_id, version=version, chosen=list(chosen))
            for proxy in holders
        ]
        answers = {proxy.shard: answer.result() for proxy, answer in zip(holders, asked, strict=True)}
        leaves = {shard: answer.arrays[0].tolist() for shard, answer in answers.items()}
        finite = all(answer.head["finite"] for answer in answers.values())
        return Outcome(finite, self.setup.shares.digest(fragment_id, leaves))

    def forget(self, fragment_id: int) -> None:
        """See Arithmetic.forget."""
        for proxy in self._holders(fragment_id):
            proxy.tell("forget", fragment=fragment_id)

    def publish(self, fragment_id: int) -> None:
        """See Arithmetic.publish."""
        for proxy in self._holders(fragment_id):
            proxy.tell("publish", fragment=fragment_id)

    def capture(self) -> RemoteMoment:
        """See Arithmetic.capture."""
        return RemoteMoment(self.setup, self.proxies, next(self._captures))

    def load(self, fragment_id: int, version: int, state: State) -> None:
        """See Arithmetic.load."""
        for proxy in self._holders(fragment_id):
            names, arrays = pack_state(self.setup.cut(fragment_id, proxy.shard, state))
            proxy.tell("load", arrays, fragment=fragment_id, version=version, names=names)

    def restore(self, fragment_id: int, version: int, flat: Flat) -> None:
        """See Arithmetic.restore."""
        for proxy in self._holders(fragment_id):
            part = self.setup.shares.cut(fragment_id, proxy.shard, flat)
            proxy.tell("restore", [part], fragment=fragment_id, version=version)

    def payload(self, fragment_id: int, base: int = NO_VERSION) -> Bytes:
        """See Arithmetic.payload."""
        return b""

    def close(self) -> None:
        """End the shards."""
        for proxy in self.proxies:
            proxy.end()


def make_arithmetic(
    setup: Setup,
    plan: FragmentPlan,
    config_path: Path,
    threads: int,
    on_death: Callable[[Exception], None],
) -> LocalShares | RemoteShares:
    """Return what a syncer computes with: itself, or merge shards. See RemoteShares."""
    if setup.shares.count == 1:
        return LocalShares(setup, threads)
    return RemoteShares(setup, plan, config_path, threads, on_death)
