"""Counters of requests to a bucket against requests that are made one by one."""

import pytest

from diloco_jax.transport.store.counts import calls, requests_text
from diloco_jax.transport.store.store import ObjectStore, Requests, StoreError


def test_a_store_counts_what_is_asked_of_it() -> None:
    requests = Requests()
    store, other = (ObjectStore(f"memory://counts/{name}", requests) for name in "ab")
    assert store.create("a/1", b"12345") and not store.create("a/1", b"12345")
    store.put("a/2", b"123")
    assert store.get("a/1", 10) == b"12345" and store.get("a/3", 10) is None
    assert len(store.list("a/")) == 2 and store.list("b/") == []
    store.delete(["a/1", "a/2"])
    other.put("a/1", b"1")
    # A refused write was sent as well.
    expected = {"puts": 4, "gets": 1, "misses": 1, "lists": 2, "deletes": 2, "sent_bytes": 14, "received_bytes": 5}
    assert requests.as_dict() == expected and calls(expected) == 10


def test_the_text_has_each_kind_and_the_bytes() -> None:
    text = requests_text({"puts": 1200, "gets": 3, "misses": 4, "sent_bytes": 1_250_000})
    assert text == (
        "1,207 requests to the bucket (writes 1,200, reads 3, reads of nothing 4, lists 0, deletes 0); 1.2 MB written, "
        "0.0 MB read"
    )


@pytest.mark.parametrize(("allowed", "said"), [("true", "error sending request"), ("", "builder error")])
def test_plain_http_is_used_if_the_environment_allows_it(
    allowed: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"ENDPOINT_URL": "http://127.0.0.1:9", "ALLOW_HTTP": allowed, "REGION": "x"}
    for name, value in {**values, "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr("diloco_jax.transport.store.store.RETRY_S", 0.01)
    with pytest.raises(StoreError, match=said):
        ObjectStore("s3://bucket/prefix").get("key", 1)
