"""The relay that injects faults between a client and an object store, with a client of the transport's library."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from tests.transport.bucket.faulty import FOREIGN, Fault, Kind, Message, StoreRelay, StoreRequest, drawn, nth, without
from tests.transport.bucket.tiny import TinyServer

pytestmark = pytest.mark.net


@pytest.fixture
def server() -> Iterator[TinyServer]:
    server = TinyServer()
    yield server
    server.close()


@pytest.fixture
def relay(server: TinyServer) -> Iterator[StoreRelay]:
    with StoreRelay(server.address) as relay:
        yield relay


def client(relay: StoreRelay, retries: int = 0) -> Any:
    return S3Store(
        "runs",
        prefix="run",
        endpoint=relay.address,
        region="us-east-1",
        skip_signature=True,
        client_options={"allow_http": True},
        retry_config={
            "max_retries": retries,
            "backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2), "base": 2},
        },
    )


def names(store: Any, prefix: str = "") -> list[str]:
    return [item["path"] for page in obstore.list(store, prefix or None) for item in page]


def test_requests_pass_and_are_counted(server: TinyServer, relay: StoreRelay) -> None:
    store = client(relay)
    obstore.put(store, "a/1", b"one")
    obstore.put(store, "a/2", b"", mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "a/2", b"two", mode="create")
    assert bytes(obstore.get(store, "a/1").bytes()) == b"one"
    assert bytes(obstore.get_range(store, "a/1", start=1, end=3)) == b"ne"
    assert obstore.head(store, "a/1")["size"] == 3 and names(store, "a") == ["a/1", "a/2"]
    obstore.delete(store, ["a/1", "a/2", "a/3"])
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "a/1")
    assert server.objects == {} and not relay.faults
    assert relay.counts == {"PUT": 3, "GET": 3, "HEAD": 1, "LIST": 1, "POST": 1}


@pytest.mark.parametrize(
    ("kind", "method", "effect"),
    [
        ("slow_down", "PUT", False),
        ("failure", "PUT", False),
        ("cut_request", "PUT", False),
        ("lost_answer", "PUT", True),
        ("slow_down", "GET", False),
        ("lost_answer", "GET", False),
        ("cut_answer", "GET", False),
    ],
)
def test_a_request_fails_once_with_or_without_its_effect(
    server: TinyServer, relay: StoreRelay, kind: Kind, method: str, effect: bool
) -> None:
    content = bytes(range(256)) * 300
    if method == "GET":
        server.objects["run/x"] = content
    relay.schedule = nth(Fault(kind), method, "run/x")

    def request(store: Any) -> Any:
        return obstore.put(store, "x", content) if method == "PUT" else bytes(obstore.get(store, "x").bytes())

    with pytest.raises(obstore.exceptions.GenericError):
        request(client(relay))
    assert ("run/x" in server.objects) == (effect or method == "GET")
    assert relay.faults == {kind: 1}
    found = request(client(relay))
    assert server.objects["run/x"] == content and (method == "PUT" or found == content)
    # The library repeats such a request by itself, if it may.
    relay.schedule = nth(Fault(kind), method, "run/x", 3)
    request(client(relay, retries=2))
    assert relay.faults == {kind: 2}


def test_a_creation_whose_answer_is_lost_is_not_repeated(server: TinyServer, relay: StoreRelay) -> None:
    """So the caller gets an error although the object is there: it has to read it."""
    relay.schedule = nth(Fault("lost_answer"), "PUT", "run/x")
    with pytest.raises(obstore.exceptions.GenericError):
        obstore.put(client(relay, retries=2), "x", b"ours", mode="create")
    assert server.objects == {"run/x": b"ours"} and relay.counts == {"PUT": 1}
    # A store that refused has done nothing, and is asked again.
    relay.schedule = nth(Fault("slow_down"), "PUT", "run/y")
    obstore.put(client(relay, retries=2), "y", b"ours", mode="create")
    assert relay.counts == {"PUT": 3}


def test_an_object_is_hidden_for_a_while(server: TinyServer, relay: StoreRelay) -> None:
    server.objects |= {"run/a&b": b"1", "run/c": b"2"}
    store = client(relay)
    relay.schedule = nth(Fault("hidden", 3600.0), "GET", "run/a&b")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            obstore.get(store, "a&b")
    assert names(store) == ["c"] and "run/a&b" in server.objects
    relay.schedule = nth(Fault("hidden", -1.0), "GET", "run/a&b", 3)
    assert bytes(obstore.get(store, "a&b").bytes()) == b"1" and names(store) == ["a&b", "c"]


def test_an_object_is_deleted_or_replaced_before_it_is_read(server: TinyServer, relay: StoreRelay) -> None:
    server.objects |= {"run/x": b"1", "run/y": b"2"}
    store = client(relay)
    relay.schedule = lambda request: Fault("deleted" if request.key == "run/x" else "foreign")
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "x")
    assert bytes(obstore.get(store, "y").bytes()) == FOREIGN
    # Nobody reads here, so nothing becomes of the object.
    obstore.put(store, "x", b"3")
    assert server.objects == {"run/x": b"3", "run/y": FOREIGN} and relay.faults == {"deleted": 1, "foreign": 1}


def test_a_late_answer_is_whole(server: TinyServer, relay: StoreRelay) -> None:
    relay.schedule = nth(Fault("late", 0.01), "PUT", "run/x")
    obstore.put(client(relay), "x", b"1")
    assert server.objects == {"run/x": b"1"} and relay.faults == {"late": 1}


def test_a_server_that_is_gone_is_reported(server: TinyServer, relay: StoreRelay) -> None:
    server.close()
    with pytest.raises(obstore.exceptions.GenericError, match="502"):
        obstore.put(client(relay), "x", b"1")


def test_drawn_faults_depend_on_the_seed_and_the_request_alone() -> None:
    requests = [StoreRequest("GET", f"run/{key}", number) for key in range(50) for number in range(1, 41)]
    rates: dict[Kind, float] = {"slow_down": 0.2, "late": 0.1}
    schedule = drawn(7, rates)
    found = [schedule(request) for request in requests]
    assert found[::-1] == [drawn(7, rates)(request) for request in requests[::-1]]
    assert found != [drawn(8, rates)(request) for request in requests]
    kinds = [fault.kind for fault in found if fault is not None]
    # Three standard deviations of 2,000 draws.
    assert abs(kinds.count("slow_down") - 400) < 54 and abs(kinds.count("late") - 200) < 41
    assert {*kinds} == {*rates} and not any(drawn(7, {})(request) for request in requests)
    with pytest.raises(ValueError, match="at most 1"):
        drawn(7, {"slow_down": 0.7, "late": 0.4})


def test_names_disappear_from_a_listing_alone() -> None:
    item = "<Contents><Key>{}</Key><Size>1</Size></Contents>"
    listing = Message("200", "", {}, "".join(map(item.format, ("a", "ab", "b", "a.b"))).encode())
    assert without(listing, ["ab", "b", "axb"]).body.decode() == item.format("a") + item.format("a.b")
