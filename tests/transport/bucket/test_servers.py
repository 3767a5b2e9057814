"""What the transport needs from an object store, on real servers: moto for S3, fake-gcs-server for Google's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import pytest
from obstore.store import from_url

from tests.transport.bucket.faulty import Fault
from tests.transport.bucket.servers import Scheme, StoreServer, environment, install, serve

pytestmark = [pytest.mark.net, pytest.mark.nightly]

RACES, RACERS = 50, 8


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    scheme: Scheme = request.param
    try:
        install(scheme)
    except RuntimeError as error:
        pytest.skip(str(error))
    with serve(scheme) as server:
        yield server


@pytest.fixture
def store(server: StoreServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client with a separate prefix."""
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    return from_url(server.url(f"test/{request.node.originalname}"), retry_config={"max_retries": 2})


def names(store: Any, prefix: str = "", **options: Any) -> list[str]:
    return sorted(item["path"] for page in obstore.list(store, prefix or None, **options) for item in page)


def test_of_several_that_create_an_object_one_succeeds(store: Any) -> None:
    def create(key: str, racer: int) -> bool:
        try:
            obstore.put(store, key, str(racer).encode(), mode="create")
            return True
        except obstore.exceptions.AlreadyExistsError:
            return False

    with ThreadPoolExecutor(RACERS) as pool:
        for race in range(RACES):
            key = f"leader/{race:08d}"
            won = list(pool.map(create, [key] * RACERS, range(RACERS)))
            assert won.count(True) == 1, (key, won)
            assert int(bytes(obstore.get(store, key).bytes())) == won.index(True)


def test_an_object_is_missing_until_it_is_written_and_replaced_whole(store: Any) -> None:
    for look in (obstore.get, obstore.head):
        with pytest.raises(FileNotFoundError):
            look(store, "a/b c+ü&<")
    for content in (b"", b"abcdef"):
        obstore.put(store, "a/b c+ü&<", content)
        assert bytes(obstore.get(store, "a/b c+ü&<").bytes()) == content
        assert obstore.head(store, "a/b c+ü&<")["size"] == len(content)
    assert bytes(obstore.get_range(store, "a/b c+ü&<", start=2, end=5)) == b"cde"
    # A range that ends behind the object is cut, and nothing reports that.
    assert bytes(obstore.get_range(store, "a/b c+ü&<", start=4, end=99)) == b"ef"
    with pytest.raises(FileNotFoundError):
        obstore.get_range(store, "a", start=0, end=1)


def test_a_large_object_is_read_in_pieces(store: Any) -> None:
    content = bytes(range(256)) * (9 << 12)
    obstore.put(store, "large", content, use_multipart=False)
    half = len(content) // 2
    pieces = [obstore.get_range(store, "large", start=start, end=start + half) for start in (0, half)]
    assert b"".join(map(bytes, pieces)) == content


def test_listings_have_all_names_below_a_prefix_in_pages(store: Any, server: StoreServer) -> None:
    keys = [f"e/1/in/hello.{number:04d}" for number in range(1050)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: obstore.put(store, key, b"x"), [*keys, "e/10/in/other", "e/1/inn"]))
    assert names(store, "e/1/in") == keys and names(store, "e/2") == []
    # fake-gcs-server ignores the start of a listing.
    assert names(store, "e/1/in", offset=keys[1000]) == (keys[1001:] if server.scheme == "s3" else keys)
    obstore.delete(store, keys)
    assert names(store) == ["e/1/inn", "e/10/in/other"]


def test_many_objects_are_deleted_and_one_that_is_gone_is_no_error_or_that_of_a_missing_one(
    store: Any, server: StoreServer
) -> None:
    for key in "abc":
        obstore.put(store, key, b"x")
    obstore.delete(store, ["a", "b"])
    assert names(store) == ["c"]
    # S3 deletes what is not there without a word. Google's store reports it, after it has tried the others.
    try:
        obstore.delete(store, ["a", "c", "b"])
        assert server.scheme == "s3"
    except FileNotFoundError:
        assert server.scheme == "gs"
    assert names(store) == []


def test_a_store_that_slows_down_is_asked_again(store: Any, server: StoreServer) -> None:
    server.relay.schedule = lambda request: Fault("slow_down") if request.number == 1 else None
    obstore.put(store, "x", b"1", mode="create")
    assert bytes(obstore.get(store, "x").bytes()) == b"1"
    server.relay.schedule = lambda _: None
