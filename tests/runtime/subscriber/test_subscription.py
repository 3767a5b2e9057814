"""Subscriptions at a real listener: models equal the syncer's bit for bit, over restarts, damage and quick rounds."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import diloco_jax
from diloco_jax.core.kinds import kind_of
from diloco_jax.core.layout import combined, whole
from diloco_jax.protocol.messages import GlobalFragment, Hello
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.subscribers import Subscribers
from diloco_jax.runtime.model.layout_text import layout_of
from diloco_jax.runtime.model.offered import describe_run
from diloco_jax.runtime.subscriber import subscription
from diloco_jax.runtime.subscriber.subscription import FollowedModel, FollowedRun, Subscription, find_run
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.endpoints.grpc_link import GrpcListener, listen
from diloco_jax.transport.link import SUBSCRIBER, Rejected, TransportConfig
from tests.limits import HANGS_S
from tests.protocol.syncer_inputs import hello
from tests.protocol.test_subscribers import close_round

pytestmark = pytest.mark.net
SHAPES: dict[str, tuple[int, ...]] = {"a": (8, 8), "b/c": (8, 8), "b/d": (64,), "e": (4, 16)}
ROUNDS = 9


class Run:
    """The syncer of a run on a thread: machine, listener and values are real; a round draws a new value."""

    def __init__(self) -> None:
        protocol = ProtocolConfig(sync_every=4, num_fragments=4, quorum=1, grace_steps_max=0.0)
        kinds = {path: kind_of(shape) for path, shape in SHAPES.items()}
        self.resolved = resolve(RunConfig(name="small", protocol=protocol), SHAPES, kinds)
        self.layouts = [whole(fragment) for fragment in self.resolved.fragments]
        self._random = np.random.default_rng(0)
        # Fragment and version -> value.
        self.history: dict[tuple[int, int], np.ndarray] = {}
        sizes = {number: 4 * layout.size for number, layout in enumerate(self.layouts)}
        self.machine = Syncer(self.resolved.config.protocol, ROUNDS, (("model", "abc"),), sizes)
        self.machine.on_begin([self._draw(number, 0) for number in sizes], 0.0)
        self.machine.on_message(hello("a"), 0.0)
        self._description = describe_run(self.resolved.config, layout_of(SHAPES, kinds))._replace(began_unix_s=1e9)
        self.sent = list[GlobalFragment]()
        # Called before a value is sent; it may return a damaged payload.
        self.on_send: Callable[[bytes], bytes] = bytes
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._over = threading.Event()
        self.listener: GrpcListener
        self._open("127.0.0.1:0", 1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _open(self, address: str, epoch: int) -> None:
        self.listener = listen(TransportConfig(address=address), run_id="small", epoch=epoch, subscribers_max=4)
        self.listener.greeter.description = self._description
        self.subscribers = Subscribers(self.machine, self.resolved.plan.fingerprint)

    def _draw(self, number: int, version: int) -> int:
        layout = self.layouts[number]
        flat = self.history[number, version] = self._random.normal(size=layout.size).astype(np.float32)
        return combined(layout.leaf_digests(flat))

    def _serve(self) -> None:
        while not self._over.is_set():
            while not self._commands.empty():
                self._commands.get()()
            delivery, answers = self.listener.receive(0.02), []
            if delivery is not None and isinstance(delivery.message, Hello):
                answers = self.subscribers.on_hello(delivery.message)
            elif delivery is not None:
                self.subscribers.on_disconnect(delivery.peer.removeprefix(SUBSCRIBER))
            for name, message in [*answers, *self.subscribers.proceed()]:
                payload = b""
                if isinstance(message, GlobalFragment):
                    self.sent.append(message)
                    payload = self.on_send(self.history[message.fragment_id, message.version].tobytes())
                self.listener.send(f"{SUBSCRIBER}{name}", message, payload)

    def do(self, command: Callable[[], object]) -> None:
        """Let the syncer's thread do something, and wait until it is done."""
        done = threading.Event()
        self._commands.put(lambda: (command(), done.set()))
        assert done.wait(HANGS_S)

    def train(self) -> None:
        """Close one round, on the syncer's thread."""
        step = self.machine.global_step + 1
        close_round(self.machine, step, lambda number: self._draw(number, step))

    def restart(self) -> None:
        """Replace the process of the syncer by one of the next epoch at the same address."""
        address = self.listener.address
        self.listener.close(0.0)
        self.machine.progress.epoch += 1
        self._open(address, self.machine.epoch)

    def parameters(self) -> dict[str, np.ndarray]:
        return self.joined(self.machine.versions)

    def joined(self, versions: Any) -> dict[str, np.ndarray]:
        """Return the model of these versions."""
        found = {path: np.empty(shape, np.float32) for path, shape in SHAPES.items()}
        for number, fragment in enumerate(self.resolved.fragments):
            views = self.layouts[number].views(self.history[number, versions[number]])
            for piece in fragment.slices:
                found[piece.path][piece.at] = views[piece.key]
        return found

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.listener.close(0.0)


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.close()


def subscribed(run: Run, every: int = 1) -> tuple[Subscription, Iterator[FollowedModel]]:
    """Return a subscription that learned of the run from the syncer alone."""
    stop, transport = threading.Event(), replace(TransportConfig(), address=run.listener.address)
    found = find_run(transport, "s", stop)
    assert found is not None and found.resolved.plan.fingerprint == run.resolved.plan.fingerprint
    made = Subscription(transport, found, "s", stop, every)
    return made, made.models()


def check(model: FollowedModel, expected: dict[str, np.ndarray]) -> None:
    assert sorted(model.parameters) == sorted(expected)
    assert all(model.parameters[path].tobytes() == value.tobytes() for path, value in expected.items())


def test_models_every_three_rounds_until_the_end(run: Run) -> None:
    made, models = subscribed(run, every=3)
    model = next(models)
    assert (model.run, model.global_step, model.versions, model.exact) == ("small", 0, (0, 0, 0, 0), True)
    check(model, run.parameters())
    for step in (3, 6):
        for _ in range(3):
            run.do(run.train)
        model = next(models)
        assert (model.global_step, model.versions, model.exact) == (step, tuple(run.machine.versions), True)
        check(model, run.parameters())
    assert len(run.sent) == 4 + 3 + 3, "between two models no value is sent"
    with pytest.raises(ValueError, match="read-only"):
        model.parameters["a"][0] = 0.0
    for _ in range(3):
        run.do(run.train)
    check(next(models), run.parameters())
    assert not made.complete and next(models, None) is None and made.complete


def test_the_end_of_the_run_brings_its_last_model_before_it_is_due(run: Run) -> None:
    made, models = subscribed(run, every=1000)
    next(models)
    for _ in range(ROUNDS):
        run.do(run.train)
    model = next(models)
    assert model.global_step == ROUNDS and model.exact
    check(model, run.parameters())
    assert next(models, None) is None and made.complete


def test_the_public_function_needs_only_the_address(run: Run) -> None:
    stop = threading.Event()
    models = diloco_jax.follow(run.listener.address, stop=stop)
    check(next(models), run.parameters())
    run.do(run.train)
    model = next(models)
    assert isinstance(model, diloco_jax.FollowedModel) and model.global_step == 1
    check(model, run.parameters())
    stop.set()
    assert next(models, None) is None


def test_a_restarted_syncer_sends_only_what_is_missing(run: Run) -> None:
    _, models = subscribed(run)
    next(models)
    run.do(run.restart)
    run.do(run.train)
    model = next(models)
    assert model.epoch == 2 and model.exact and len(run.sent) == 4 + 1
    check(model, run.parameters())


def test_values_of_a_history_that_is_void_are_replaced(run: Run) -> None:
    """After a rewind the syncer has other values under the same versions."""
    _, models = subscribed(run)
    run.do(run.train)
    while next(models).global_step < 1:
        pass

    def rewind() -> None:
        run.restart()
        run.machine.downstream.digests = [run._draw(n, version) for n, version in enumerate(run.machine.versions)]

    run.do(rewind)
    model = next(models)
    assert model.exact and model.epoch == 2
    check(model, run.parameters())


def test_another_run_of_the_same_name_and_address_is_not_followed(run: Run) -> None:
    _, models = subscribed(run)
    next(models)
    run._description = run._description._replace(began_unix_s=1e9 + 1)
    run.do(run.restart)
    with pytest.raises(Rejected, match="serves another run now, which started on 2001-09-09 01:46:41 UTC"):
        next(models)


def test_a_damaged_value_is_requested_again(run: Run) -> None:
    def damage(payload: bytes) -> bytes:
        run.on_send = bytes
        return payload[:-1] + bytes([payload[-1] ^ 1])

    run.on_send = damage
    _, models = subscribed(run)
    check(next(models), run.parameters())
    assert len(run.sent) == 5


def test_rounds_that_are_quicker_than_values_give_models_of_mixed_ages(run: Run) -> None:
    def train_first(payload: bytes) -> bytes:
        if run.machine.global_step < ROUNDS - 1:
            run.train()
        return payload

    run.on_send = train_first
    _, models = subscribed(run)
    model = next(models)
    assert not model.exact
    check(model, run.joined(model.versions))
    assert [message.fragment_id for message in run.sent[:5]] == [0, 1, 2, 3, 0]
    model = list(models_until_exact(models))[-1]
    check(model, run.parameters())


def models_until_exact(models: Iterator[FollowedModel]) -> Iterator[FollowedModel]:
    for model in models:
        yield model
        if model.exact:
            return


@pytest.mark.parametrize("every", [0, -1])
def test_a_wrong_number_of_rounds(run: Run, every: int) -> None:
    with pytest.raises(ValueError, match=f"every is {every} global steps; use at least 1"):
        Subscription(TransportConfig(), FollowedRun(run.resolved, 0.0), "s", threading.Event(), every)


def test_names_of_processes_are_allowed_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription.socket, "gethostname", lambda: "_a b" + "c" * 90)
    assert subscription.check_name(subscription.default_name()).startswith("a-b")
