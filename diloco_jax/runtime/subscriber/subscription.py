"""A subscription to the global model of a run: connection, requests, values, and the moments when a model is complete.

protocol/syncer/subscribers.py has the syncer's side. A subscription asks for values until it has seen a whole model:

* `Welcome`: it holds the newest value of every fragment, so its model is the syncer's own at that global step.
* A fragment comes a second time: the syncer has sent every other value that was missing in between. This happens when
  values take longer than rounds. The values then have different ages, but each is as new as the first request or newer.

Between two models it only listens to Advance, so a model every N steps costs the syncer one value per fragment.
"""

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from os import getpid
from typing import NamedTuple

import numpy as np

from diloco_jax.core.layout import Layout, combined, whole
from diloco_jax.protocol.messages import (
    NO_VERSION,
    Advance,
    GlobalFragment,
    Hello,
    Refuse,
    Stop,
    SyncerMessage,
    Welcome,
)
from diloco_jax.protocol.syncer.subscribers import MODEL_LAYOUT
from diloco_jax.runtime.model.layout_text import read_layout
from diloco_jax.runtime.records.log_lines import show_lines
from diloco_jax.settings.resolved import ResolvedRun, resolve
from diloco_jax.settings.text import parse_text
from diloco_jax.transport.endpoints.ends import AnyLink, connect
from diloco_jax.transport.endpoints.greeting import ask_description
from diloco_jax.transport.endpoints.reach import await_listener
from diloco_jax.transport.link import Delivery, LinkClosed, Rejected, TransportConfig, TransportError, check_name
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.session.spares import keep_spares

RECONNECT_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
# The wait for a message ends this often to notice the end of the subscription.
IDLE_S = 0.2
_LEFT_OUT = re.compile(r"[^A-Za-z0-9._-]+")

log = logging.getLogger(__name__)


class FollowedRun(NamedTuple):
    """The run of a subscription."""

    resolved: ResolvedRun
    # When the run started, in seconds since 1970. It distinguishes runs with the same name; 0 if unknown.
    began_unix_s: float

    @property
    def name(self) -> str:
        """Return the name of the run; other runs may have the same name."""
        return self.resolved.config.name


class FollowedModel(NamedTuple):
    """The global model of a run at one moment, as its syncer has it."""

    run: str
    # The syncer's clock when the last value was sent.
    global_step: int
    # The process of the syncer that sent it, counted over the run.
    epoch: int
    # The global step whose round made the value of each fragment; 0 is the initial model.
    versions: tuple[int, ...]
    # True: the model that the syncer held at `global_step`. False: newer values replaced some of them meanwhile.
    exact: bool
    # Unsharded float32 arrays by path. They change with the next model, so copy what you keep.
    parameters: Mapping[str, np.ndarray]


def other_run(ours_unix_s: float, theirs_unix_s: float) -> bool:
    """Return whether two times of a start, 0 if unknown, belong to different runs."""
    return bool(ours_unix_s and theirs_unix_s) and ours_unix_s != theirs_unix_s


def utc(unix_s: float) -> str:
    """Return a time in seconds since 1970 for people; "an unknown day" for 0."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC" if unix_s else "an unknown day"


def default_name() -> str:
    """Return a name for a subscriber without one: those of the machine and of the process."""
    host = _LEFT_OUT.sub("-", socket.gethostname())[:60].strip(".-_") or "machine"
    return f"{host}-{getpid()}"


def find_run(transport: TransportConfig, name: str, stop: threading.Event) -> FollowedRun | None:
    """Ask the syncer for the run's config and the layout of its model; wait while the run has no model.

    Returns:
        None once `stop` is set.

    Raises:
        TransportError: nothing answers at the address, or the syncer refused our certificate or token.
        ValueError: our certificate, key or token cannot be used, or a setting is of another release.
    """
    waiting = False
    while not stop.is_set():
        await_listener(transport, "the address", log.warning, stop)
        described = ask_description(transport, name)
        if described.layout:
            config = parse_text(described.config, f"the config from the syncer at {transport.address}")
            return FollowedRun(resolve(config, *read_layout(described.layout)), described.began_unix_s)
        if not waiting:
            waiting = True
            log.info("the run has no model yet; waiting for its first island")
        stop.wait(RECONNECT_DELAYS_S[-1])
    return None


class Subscription:
    """The connection of one subscriber, and the model that it holds; for one thread.

    Args:
        transport: address and credentials.
        name: name of the subscriber; with certificates the name in its own one.
        stop: ends `models`.
        every: the least number of global steps from one model to the next.

    Raises:
        ValueError: `every` is below 1, or the name is not allowed.
    """

    def __init__(
        self, transport: TransportConfig, run: FollowedRun, name: str, stop: threading.Event, every: int = 1
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every} global steps; use at least 1")
        self._transport, self._name, self._stop, self._every = transport, check_name(name), stop, every
        self._began_unix_s, self._run = run.began_unix_s, run.resolved
        self._incarnation = int(time.time() * 1000)
        self._partials = Partials(transport.payload_bytes_max, transport.resume_s)
        # Whole values arrive one at a time.
        keep_spares(max(self._run.payload_bytes("float32")))
        self._layouts: list[Layout] = [whole(fragment) for fragment in self._run.fragments]
        self._parameters = {path: np.zeros(shape, np.float32) for path, shape in self._run.plan.shapes.items()}
        self._versions, self._digests = [NO_VERSION] * len(self._layouts), [0] * len(self._layouts)
        self._link: AnyLink | None = None
        # Attempts to connect since the last message.
        self._attempts = 0
        self._epoch = 0
        self._clock = 0
        # The global step of the next model.
        self._due = 0
        # Whether a request has no answer yet, and whether the run is complete.
        self._asked = self._over = False
        # Fragments that came since the request for this model.
        self._came: set[int] = set()
        # The model that was returned last.
        self._returned: tuple[object, ...] = ()
        self.complete = False
        """True once the run is complete, and `models` has returned its last model."""

    @property
    def run(self) -> ResolvedRun:
        """Return the run."""
        return self._run

    def models(self) -> Iterator[FollowedModel]:
        """Yield the first model, then a model every N global steps, and the last model of the run.

        A lost connection is opened again, without a limit of attempts. The first connection must succeed.

        Raises:
            TransportError: the syncer cannot be reached at first, or refuses this subscriber.
            ValueError: the syncer expects another model, or our certificate, key or token cannot be used.
        """
        try:
            self._connect()
            while (received := self._receive()) is not None:
                message, payload = received
                exact = self._take(message, payload)
                # Otherwise the next payload could not use this one's memory.
                del received, payload
                last = self._over and isinstance(message, Welcome)
                if last:
                    # The syncer of a complete run waits for its subscribers.
                    self.close()
                if exact is not None and (model := self._model(exact)) is not None:
                    yield model
                if last:
                    self.complete = True
                    return
                if not self._asked and (self._over or self._came or self._clock >= self._due):
                    self._ask()
            if self._over:
                log.warning("the run is complete, but its syncer ended before its newest values were here")
        finally:
            self.close()

    def close(self) -> None:
        """End the connection."""
        link, self._link = self._link, None
        if link is not None:
            link.close(0.0)

    def _take(self, message: SyncerMessage, payload: bytes | memoryview) -> bool | None:
        """Take a message; return None if it completes no model, else whether that model is exact."""
        match message:
            case GlobalFragment():
                self._asked, self._clock, self._epoch = False, max(self._clock, message.global_step), message.epoch
                if not self._keep(message, payload):
                    return None
                repeated = message.fragment_id in self._came
                self._came.add(message.fragment_id)
                return False if repeated else None
            case Welcome(global_step, _, epoch):
                self._asked, self._clock, self._epoch = False, global_step, epoch
                return True
            case Advance(global_step):
                self._clock = max(self._clock, global_step)
            case Stop():
                self._over = True
            case Refuse(reason):
                raise ValueError(f"the syncer refused this subscriber: {reason}")
        return None

    def _keep(self, message: GlobalFragment, payload: bytes | memoryview) -> bool:
        """Put an arrived value in its place; return False, and connect again, if it is damaged."""
        number = message.fragment_id
        if 0 <= number < len(self._layouts) and len(payload) == 4 * self._layouts[number].size:
            layout, flat = self._layouts[number], np.frombuffer(payload, "<f4")
            if combined(layout.leaf_digests(flat)) == message.digest:
                views = layout.views(flat)
                for piece in self._run.fragments[number].slices:
                    self._parameters[piece.path][piece.at] = views[piece.key]
                self._versions[number], self._digests[number] = message.version, message.digest
                return True
        log.warning(f"version {message.version} of fragment {number} arrived damaged; connecting again")
        self._lose()
        return False

    def _model(self, exact: bool) -> FollowedModel | None:
        """Return the present model, None if it was returned before; the next one is due N global steps later."""
        self._came.clear()
        self._due = self._clock + self._every
        key = (tuple(self._versions), tuple(self._digests), exact)
        if key == self._returned:
            return None
        self._returned = key
        parameters = {path: value.view() for path, value in self._parameters.items()}
        for value in parameters.values():
            value.flags.writeable = False
        return FollowedModel(self._run.config.name, self._clock, self._epoch, key[0], exact, parameters)

    def _receive(self) -> tuple[SyncerMessage, bytes | memoryview] | None:
        """Return the next message with its payload, None once the subscription shall end; connect again if needed."""
        while not self._stop.is_set():
            if self._link is None:
                # The syncer of a complete run does not return.
                if self._over:
                    return None
                self._connect_again()
                continue
            delivery: Delivery | None = self._link.receive(IDLE_S)
            if delivery is None:
                continue
            if delivery.kind == "disconnected":
                log.info(f"connection lost ({delivery.reason}); connecting again")
                self._lose()
                continue
            self._attempts = 0
            return delivery.message, delivery.payload  # type: ignore[return-value]
        return None

    def _connect(self) -> None:
        """Open the connection, and request values."""
        # The clock of a run that went back to a snapshot is lower than before.
        self._clock = self._due = 0
        self._link = connect(
            self._transport,
            run_id=self._run.config.name,
            epoch=self._epoch,
            learner_id=self._name,
            incarnation=self._incarnation,
            partials=self._partials,
            subscribes=True,
        )
        self._ask()

    def _connect_again(self) -> None:
        self._stop.wait(RECONNECT_DELAYS_S[min(self._attempts, len(RECONNECT_DELAYS_S) - 1)])
        self._attempts += 1
        if self._stop.is_set():
            return
        try:
            self._check_same_run()
            self._connect()
        except Rejected:
            raise
        # A ValueError comes from a certificate that has expired; it may be renewed.
        except (TransportError, ValueError) as error:
            log.info(f"attempt {self._attempts}: {error}")

    def _check_same_run(self) -> None:
        """Raise Rejected if the syncer at the address serves another run now, which may have the same name."""
        theirs = ask_description(self._transport, self._name).began_unix_s
        if other_run(self._began_unix_s, theirs):
            raise Rejected(
                f"the syncer at {self._transport.address} serves another run now, which started on "
                f"{utc(theirs)}; start another process to follow it, with another folder"
            )

    def _lose(self) -> None:
        """End a connection that is lost, and what was expected of it."""
        self.close()
        self._asked = False
        self._came.clear()

    def _ask(self) -> None:
        """Request a value that is missing."""
        if self._link is None:
            return
        held = tuple(self._versions), tuple(self._digests)
        fingerprint = ((MODEL_LAYOUT, self._run.plan.fingerprint),)
        hello = Hello(self._name, self._incarnation, fingerprint, *held, self._epoch, 0, 0, evaluates=False)
        try:
            self._link.send(hello)
            self._asked = True
        # The end of the connection is received next.
        except LinkClosed:
            log.debug("a request was not sent")


def follow(
    address: str,
    *,
    every: int = 1,
    name: str = "",
    transport: TransportConfig | None = None,
    stop: threading.Event | None = None,
) -> Iterator[FollowedModel]:
    """Yield the global model of a run while it trains: first the present model, then one every N global steps.

    The loop gets no data and has no weight in a merge, and the run does not wait for it. The last model is that of the
    complete run.

    Args:
        address: host:port of the syncer.
        every: the least number of global steps from one model to the next.
        name: name of this subscriber; with certificates the name in its own one. "" for a name of this process.
        transport: certificates and token for the syncer; None for those of a run on this machine.
        stop: ends the iteration when it is set.

    Raises:
        TransportError: the syncer cannot be reached, or refuses this subscriber.
        ValueError: an argument is not allowed, or our certificate, key or token cannot be used.
    """
    show_lines()
    ends, own = stop or threading.Event(), replace(transport or TransportConfig(), address=address)
    called = check_name(name or default_name())
    if (run := find_run(own, called, ends)) is not None:
        yield from Subscription(own, run, called, ends, every).models()
