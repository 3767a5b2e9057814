"""Objects below a URL: memory and a folder behave alike, and what a folder adds does no harm."""

import builtins
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.transport.store import store
from diloco_jax.transport.store.store import ObjectStore, StoreError, TooLarge
from tests.limits import HANGS_S


@pytest.fixture(params=["memory", "folder"])
def url(request: pytest.FixtureRequest, address: str, folder: str) -> str:
    return {"memory": address, "folder": folder}[request.param]


@pytest.fixture
def objects(url: str) -> ObjectStore:
    return ObjectStore(url)


def test_objects_by_name(objects: ObjectStore) -> None:
    assert objects.get("a/b", 9) is None and not objects.exists("a/b") and objects.list("") == []
    objects.put("a/b", b"one")
    objects.put("a/b", b"three")
    assert objects.get("a/b", 5) == b"three" and objects.exists("a/b")
    with pytest.raises(TooLarge, match="the object a/b has 5 bytes, the limit is 4"):
        objects.get("a/b", 4)
    assert objects.create("c", b"") and not objects.create("c", b"other") and objects.get("c", 5) == b""
    objects.delete(["a/b", "c"])
    assert objects.list("") == []


def test_of_many_that_create_a_name_one_succeeds(objects: ObjectStore) -> None:
    won, start = list[int](), threading.Barrier(8)

    def create(number: int) -> None:
        start.wait(HANGS_S)
        if objects.create("leader", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(HANGS_S)
    assert len(won) == 1 and objects.get("leader", 1) == b"%d" % won[0]


def test_large_objects_travel_in_pieces(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PIECE_BYTES", 10)
    for size in (1, 9, 10, 11, 20, 37):
        data = os.urandom(size)
        objects.put("x", data)
        assert objects.read_whole("x", size) == data
        # An object that is shorter than announced is none, wherever it ends.
        for longer in (size + 1, size + 10, size + 25):
            assert objects.read_whole("x", longer) is None
        assert objects.read_whole("x", size - 1 or 1) == data[: size - 1 or 1]
    assert objects.read_whole("nothing", 5) is None


def test_listings_have_a_prefix_a_limit_and_a_start(objects: ObjectStore) -> None:
    for name in ("in/b", "in/a", "in/c", "other", "inner"):
        objects.put(name, b"")
    assert objects.list("in/") == ["in/a", "in/b", "in/c"]
    assert objects.list("in/", 2) == ["in/a", "in/b"]
    assert objects.list("in/", after="in/a") == ["in/b", "in/c"]
    assert objects.list("") == ["in/a", "in/b", "in/c", "inner", "other"] and objects.list("no/") == []


def test_deleting_what_is_gone_keeps_nothing(objects: ObjectStore) -> None:
    for name in ("a", "b"):
        objects.put(name, b"")
    objects.delete(["gone", "a", "gone too", "b"])
    objects.delete([])
    assert objects.list("") == []


def test_requests_are_counted_as_their_owner_counts_them(objects: ObjectStore) -> None:
    objects.put("a", bytes(5))
    objects.create("b", bytes(7))
    objects.get("a", 9)
    objects.get("no", 9)
    objects.read_whole("b", 7)
    objects.list("")
    objects.list("no/")
    objects.delete(["a", "b"])
    assert objects.requests.as_dict() == {
        "puts": 2,
        "gets": 2,
        "misses": 1,
        "lists": 2,
        "deletes": 2,
        "sent_bytes": 12,
        "received_bytes": 12,
    }


class Deletes:
    """A store that reports a missing object as an error, and then deletes none of the others."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def delete(self, _: Any, keys: list[str]) -> None:
        if missing := set(keys) - self.names:
            raise FileNotFoundError(missing)
        self.names -= set(keys)


def test_a_store_that_reports_what_is_gone_deletes_the_rest(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Deletes({"a", "b", "c"})
    monkeypatch.setattr("obstore.delete", other.delete)
    ObjectStore(address).delete(["a", "gone", "c"])
    assert other.names == {"b"}


def test_a_request_that_fails_is_an_error_of_the_store(objects: ObjectStore) -> None:
    with pytest.raises(StoreError, match=r"cannot write \.\./x in (memory|file)://"):
        objects.put("../x", b"")
    with pytest.raises(StoreError, match=r"cannot read \.\./x"):
        objects.get("../x", 1)
    with pytest.raises(StoreError, match=r"cannot read \.\./x|cannot look for \.\./x"):
        objects.read_whole("../x", 1)
    with pytest.raises(StoreError, match=r"cannot delete \.\./x"):
        objects.delete(["../x"])


def test_a_folder_with_files_of_others_is_listed(folder: str) -> None:
    """Check that a file whose name cannot be an object's does not hide the others."""
    objects, root = ObjectStore(folder), Path(folder.removeprefix("file://"))
    objects.put("in/hello", b"1")
    for name in ("a b", "é", "\n", "\x01", "%2F", "~", "x#1"):
        (root / "in" / name).write_text("x")
    os.symlink(root / "nothing", root / "in" / "link")
    (root / "in" / "folder").mkdir()
    found = objects.list("in/")
    assert "in/hello" in found and "in/a b" in found and "in/\n" not in found and "in/x#1" not in found
    objects.delete(found)
    assert objects.list("in/") == []


def test_a_folder_removes_folders_under_a_writer(folder: str) -> None:
    """Check that a writer and listings do not notice that another process empties and removes the same folder."""
    objects, errors, over = ObjectStore(folder), list[Exception](), threading.Event()

    def empties() -> None:
        while not over.is_set():
            try:
                objects.delete(objects.list("a/"))
            except Exception as error:
                errors.append(error)

    other = threading.Thread(target=empties)
    other.start()
    try:
        for number in range(150):
            objects.put(f"a/b/{number % 3}", b"x")
    finally:
        over.set()
        other.join(HANGS_S)
    objects.delete(objects.list("a/"))
    root = Path(folder.removeprefix("file://"))
    assert not errors and not list(root.rglob("*")) and root.exists()


def test_without_the_package_the_error_names_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("obstore"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"needs obstore: pip install 'diloco-jax\[bucket\]'"):
        ObjectStore(address)
