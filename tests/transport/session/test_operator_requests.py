"""Requests of operators: from the listener's threads to the driver's thread, and over the wire."""

import threading

import grpc
import pytest

from diloco_jax.transport.link import TransportConfig, TransportError
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session import calls, operator_requests
from diloco_jax.transport.session.calls import DaemonThreads, ask_operator, read_drain_request, read_operator_request
from diloco_jax.transport.session.operator_requests import ADMIT, BAN, DRAIN, Operate, OperatorRequest, OperatorRequests
from tests.limits import HANGS_S
from tests.transport.ends import Ends

LEAVE = OperatorRequest(DRAIN, "a")


@pytest.fixture
def requests() -> OperatorRequests:
    return OperatorRequests(lambda: None)


def ask(requests: OperatorRequests, operate: Operate | None, request: OperatorRequest = LEAVE) -> tuple[bool, str]:
    """Send a request from another thread while this one drives."""
    answers: list[tuple[bool, str]] = []
    thread = threading.Thread(target=lambda: answers.append(requests.ask(request)))
    thread.start()
    try:
        while thread.is_alive() and not answers:
            requests.answer(operate)
    finally:
        thread.join(HANGS_S)
    return answers[0]


def test_a_request_runs_on_the_drivers_thread_or_tells_why_not(requests: OperatorRequests) -> None:
    threads: list[int] = []

    def operate(request: OperatorRequest) -> str:
        threads.append(threading.get_ident())
        return f"{request.action} of {request.learner_id}: {request.why}"

    def refuse(request: OperatorRequest) -> str:
        raise ValueError(f"no learner {request.learner_id!r}")

    assert ask(requests, operate, OperatorRequest(BAN, "a", "x")) == (True, "ban of a: x")
    assert threads == [threading.get_ident()]
    assert ask(requests, refuse) == (False, "no learner 'a'")
    assert ask(requests, None) == (False, "this syncer cannot drain learners")


def test_a_request_that_fails_is_the_drivers_error_and_the_caller_hears_of_it(requests: OperatorRequests) -> None:
    answers: list[tuple[bool, str]] = []
    thread = threading.Thread(target=lambda: answers.append(requests.ask(LEAVE)))
    thread.start()
    with pytest.raises(KeyError):
        while thread.is_alive():
            requests.answer(lambda request: {}[request])
    thread.join(HANGS_S)
    assert answers == [(False, "the syncer failed; see its log")]


def test_a_request_to_a_busy_driver_is_withdrawn(requests: OperatorRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_requests, "OPERATOR_ANSWER_S", 0.01)
    done: list[OperatorRequest] = []
    ok, message = requests.ask(LEAVE)
    assert not ok and "was busy for 0.01 s and did nothing; ask again" in message
    requests.answer(lambda request: done.append(request) or "too late")  # type: ignore[func-returns-value]
    assert not done


def test_requests_are_bounded(requests: OperatorRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_requests, "WAITING_MAX", 0)
    assert requests.ask(LEAVE) == (False, "0 requests of operators are waiting; ask again later")
    requests.close()
    assert requests.ask(LEAVE) == (False, "the syncer is closing")


def test_only_known_requests_with_allowed_names_are_read() -> None:
    sent = pb.OperatorRequest(action=BAN, learner_id="a", why="bad data").SerializeToString()
    assert read_operator_request(sent) == (BAN, "a", "bad data")
    assert read_drain_request(pb.DrainRequest(learner_id="a").SerializeToString()) == LEAVE
    # A syncer never drains on this call.
    for action, name, words in (
        (DRAIN, "a", "cannot do 'drain'"),
        ("", "a", "cannot do ''"),
        (ADMIT, "../a", "'../a' is not allowed"),
    ):
        with pytest.raises(ValueError, match=words):
            read_operator_request(pb.OperatorRequest(action=action, learner_id=name).SerializeToString())
    with pytest.raises(ValueError, match="malformed request"):
        read_operator_request(b"\xff")


@pytest.mark.net
@pytest.mark.parametrize("request_", [LEAVE, OperatorRequest(BAN, "a", "bad data"), OperatorRequest(ADMIT, "a")])
def test_a_request_arrives_as_it_was_sent(ends: Ends, request_: OperatorRequest) -> None:
    listener, got, stop = ends.listen(), list[OperatorRequest](), threading.Event()
    listener.on_operator = lambda request: got.append(request) or "done"  # type: ignore[func-returns-value]

    def drive() -> None:
        while not stop.is_set():
            listener.receive(HANGS_S)

    driver = threading.Thread(target=drive)
    driver.start()
    assert ask_operator(TransportConfig(address=listener.address), request_) == (True, "done")
    stop.set()
    listener.wake()
    driver.join(HANGS_S)
    assert got == [request_]


@pytest.mark.net
def test_an_older_syncer_drains_and_does_not_take_a_ban_for_a_drain() -> None:
    drained: list[bytes] = []

    def drain(raw: bytes, context: object) -> pb.DrainReply:
        del context
        drained.append(raw)
        return pb.DrainReply(ok=True, message="a leaves")

    server = grpc.server(DaemonThreads())
    handlers = {"Drain": grpc.unary_unary_rpc_method_handler(drain, response_serializer=calls.serialized)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(calls.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    there = TransportConfig(address=f"127.0.0.1:{port}")
    assert ask_operator(there, LEAVE) == (True, "a leaves")
    # The bytes of the release before.
    assert drained == [b"\n\x01a"]
    with pytest.raises(TransportError, match=r"or is of another release of diloco_jax \(UNIMPLEMENTED"):
        ask_operator(there, OperatorRequest(BAN, "a", "bad data"))
    assert len(drained) == 1
    server.stop(0).wait(HANGS_S)
