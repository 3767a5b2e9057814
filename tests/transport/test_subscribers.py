"""Subscribers at the real listener: they can only request the model, in bounded numbers, and disturb no learner."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_jax.protocol import messages as m
from diloco_jax.transport.endpoints import grpc_link
from diloco_jax.transport.endpoints.greeting import ask_description
from diloco_jax.transport.endpoints.grpc_link import GrpcLink, GrpcListener
from diloco_jax.transport.link import LEARNER_TYPES, SUBSCRIBER, TransportError
from diloco_jax.transport.session.calls import ask_operator
from diloco_jax.transport.session.description import Description
from diloco_jax.transport.session.operator_requests import DRAIN, OperatorRequest
from diloco_jax.transport.session.stream import Outgoing
from diloco_jax.transport.trust import certificates
from tests.transport.ends import CONFIG, LIMIT, Ends, greet, hear, hear_end, hear_message

pytestmark = pytest.mark.net
HELLO = m.Hello("s", 0, (), (0,), (0,), 0, 0, 0, evaluates=False)


@pytest.fixture
def listener(ends: Ends) -> Iterator[GrpcListener]:
    ends.listener = ends.keep(grpc_link.listen(CONFIG, run_id="run", epoch=1, subscribers_max=2))
    yield ends.listener


def subscribe(ends: Ends, name: str = "s") -> GrpcLink:
    """Open a subscriber's link, and wait until the listener has its request."""
    link = ends.connect(name, subscribes=True)
    link.send(HELLO._replace(learner_id=name))
    delivery = hear(ends.listener)
    assert delivery.peer == f"{SUBSCRIBER}{name}" and isinstance(delivery.message, m.Hello)
    return link


def test_a_subscriber_with_the_name_of_a_learner_leaves_it_alone(ends: Ends, listener: GrpcListener) -> None:
    learner = ends.meet("a")
    subscriber = subscribe(ends, "a")
    message = m.GlobalFragment(1, 0, 1, 1, 7, 3)
    assert listener.send(f"{SUBSCRIBER}a", message, b"abc")
    delivery = hear(subscriber)
    assert (delivery.message, bytes(delivery.payload)) == (message, b"abc")
    greet(listener, learner)
    assert listener.send("a", m.Advance(1)) and hear_message(learner) == m.Advance(1)
    subscriber.close(0.0)
    assert hear_end(listener).peer == f"{SUBSCRIBER}a"
    greet(listener, learner)


def test_a_subscriber_can_send_nothing_but_requests(ends: Ends, listener: GrpcListener) -> None:
    link = subscribe(ends)
    for message in (m.Heartbeat("s", 0), m.FragmentValue("s", 0, 1, 0, 1, 1, 1, 0, 1, 0)):
        with pytest.raises(ValueError, match="it sends Hello"):
            link.send(message)
    # A changed program that sends it nevertheless loses its connection, and the driver sees nothing of it.
    link._sends = LEARNER_TYPES
    link.send(m.Heartbeat("s", 0))
    assert hear_end(listener, "cannot be used").peer == f"{SUBSCRIBER}s"


def test_a_subscriber_cannot_fill_memory_with_a_payload_of_no_message(ends: Ends, listener: GrpcListener) -> None:
    session = subscribe(ends)._session
    # The chunks of a message may arrive before the message, so only their place shows that nobody waits for them.
    assert session._outboxes[True].put(Outgoing(HELLO, b"", (memoryview(bytes(LIMIT)),)))
    assert hear_end(listener, "a payload from a side that sends none").peer == f"{SUBSCRIBER}s"


def test_more_subscribers_than_the_limit_are_refused(ends: Ends, listener: GrpcListener) -> None:
    first = subscribe(ends, "s1")
    subscribe(ends, "s2")
    with pytest.raises(TransportError, match=r"takes 2 subscribers: stop one, or raise syncer\.subscribers_max"):
        ends.connect("s3", subscribes=True)
    greet(listener, ends.connect("a"), "a")
    first.close(0.0)
    hear_end(listener)
    subscribe(ends, "s3")


def test_a_listener_takes_no_subscribers_unless_it_is_told(ends: Ends) -> None:
    ends.listen()
    with pytest.raises(TransportError, match="takes 0 subscribers"):
        ends.connect("s", subscribes=True)


def test_a_slow_subscriber_is_cut_when_its_queue_is_full(ends: Ends) -> None:
    config = replace(CONFIG, queue_messages_max=4)
    listener = ends.listener = ends.keep(grpc_link.listen(config, run_id="run", epoch=1, subscribers_max=1))
    learner = ends.meet("a")
    subscribe(ends)
    assert not all(listener.send(f"{SUBSCRIBER}s", m.Advance(1)) for _ in range(100_000))
    assert hear_end(listener, "queue").peer == f"{SUBSCRIBER}s"
    assert listener.send("a", m.Advance(1)) and hear_message(learner) == m.Advance(1)


def test_a_subscriber_that_requests_values_and_does_not_read_them_is_cut(
    ends: Ends, listener: GrpcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It stops to read after the first value.
    link, value = subscribe(ends), bytes(LIMIT)
    message = m.GlobalFragment(1, 0, 1, 1, 7, LIMIT)
    accepted = 0
    while accepted < 20 and listener.send(f"{SUBSCRIBER}s", message, value):
        accepted += 1
    assert accepted < 5
    assert hear_end(listener, "queue").peer == f"{SUBSCRIBER}s"
    # One that reads gets as many as it requests.
    link.close(0.0)
    link = subscribe(ends)
    for number in range(20):
        assert listener.send(f"{SUBSCRIBER}s", message._replace(version=number), value[:1000])
        assert hear(link).message.version == number  # type: ignore[union-attr]


def test_a_certificate_of_a_subscriber_permits_nothing_but_to_follow(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_link, "PATIENCE_S", 0.1)
    certificates.make(tmp_path, ["a"], ["reader"])
    settings = certificates.settings(tmp_path)
    listener = ends.listener = ends.keep(
        grpc_link.listen(replace(CONFIG, **settings), run_id="run", epoch=1, subscribers_max=2)
    )
    # It also has the run's token, as every process does.
    link = ends.connect("reader", subscribes=True, **settings)
    link.send(HELLO._replace(learner_id="reader"))
    assert hear(listener).peer == f"{SUBSCRIBER}reader"
    message = m.GlobalFragment(1, 0, 1, 1, 7, 3)
    assert listener.send(f"{SUBSCRIBER}reader", message, b"abc") and hear_message(link) == message
    # The folder has the syncer's certificate, too, which permits more.
    own = {name: path.replace("{name}", "reader") for name, path in settings.items()}
    there = replace(CONFIG, address=listener.address, **own)
    for attempt in (
        lambda: ends.connect("reader", **own),
        lambda: ask_description(there, "reader", numbered=True),
        lambda: ask_operator(there, OperatorRequest(DRAIN, "reader")),
    ):
        with pytest.raises(TransportError, match="the certificate is that of 'subscriber/reader'"):
            attempt()
    # The certificate of a learner permits to follow under its name, too.
    ends.connect("a", subscribes=True, **settings).send(HELLO._replace(learner_id="a"))
    assert hear(listener).peer == f"{SUBSCRIBER}a"
    assert listener.receive(0) is None, "the driver must not notice a refused call"


def test_a_stranger_gets_nothing(ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_link, "PATIENCE_S", 0.1)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    certificates.make(ours, ["s"])
    certificates.make(theirs, ["s"])
    config = replace(CONFIG, **certificates.settings(ours))
    listener = ends.listener = ends.keep(grpc_link.listen(config, run_id="run", epoch=1, subscribers_max=2))
    listener.greeter.description = Description("the config", "the layout")
    (tmp_path / "token").write_text("not the run's token")
    strangers = {
        "no certificate": CONFIG,
        "another authority": replace(CONFIG, **certificates.settings(theirs)),
        "another token": replace(config, token_file=str(tmp_path / "token")),
    }
    for stranger in strangers.values():
        there = replace(stranger, address=listener.address, connect_timeout_s=1.0)
        for attempt in (
            lambda there=there: grpc_link.connect(there, run_id="run", learner_id="s", incarnation=0, subscribes=True),
            lambda there=there: ask_description(there, "s"),
        ):
            with pytest.raises(TransportError):
                attempt()
    assert listener.receive(0) is None, "the driver must not see a stranger"
    known = replace(config, address=listener.address)
    assert ask_description(known, "s").layout == "the layout"
    link = ends.keep(grpc_link.connect(known, run_id="run", learner_id="s", incarnation=0, subscribes=True))
    link.send(HELLO)
    assert hear(listener).message == HELLO
