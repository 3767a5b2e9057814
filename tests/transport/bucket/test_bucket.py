"""One run's bucket: who leads, what is recognised as one's own, and what is deleted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.transport.link import TransportConfig, TransportError
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket
from diloco_jax.transport.store.requests import await_leader
from diloco_jax.transport.store.seal import Unsealed
from diloco_jax.transport.store.store import StoreError


@pytest.fixture
def bucket(address: str) -> Bucket:
    return Bucket(TransportConfig(address=address, poll_s=0.001, connect_timeout_s=0.05))


def with_token(bucket: Bucket, folder: Path, token: str) -> Bucket:
    (folder / token).write_text(token * 20)
    return Bucket(replace(bucket.config, token_file=str(folder / token)))


def test_nobody_else_may_read_a_bucket_without_a_token() -> None:
    with pytest.raises(ValueError, match=r"nothing would be encrypted: set transport\.token_file"):
        Bucket(TransportConfig(address="s3://bucket/run"))


def test_one_process_leads_an_epoch(bucket: Bucket) -> None:
    first = bucket.lead(1, "run", "5eed")
    assert bucket.leader() == first
    for epoch in (0, 1):
        with pytest.raises(ValueError, match=rf"has a syncer of epoch 1, this one is of epoch {epoch}: stop the other"):
            bucket.lead(epoch, "run", "5eed")
    for run_id, run in (("other", "5eed"), ("run", "other")):
        with pytest.raises(ValueError, match=r"has objects of run 'run' \(5eed\): use another prefix"):
            bucket.lead(2, run_id, run)
    assert bucket.lead_on(first) is None
    second = bucket.lead(2, "run", "5eed")
    assert bucket.leader() == second and bucket.lead_on(first) == second and bucket.lead_on(second) is None


def test_a_leader_of_the_same_epoch_that_was_quicker_leads(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Bucket(bucket.config)
    first, looks = bucket.lead(3, "run", ""), [(None, list[str]())]
    # Both look before either creates.
    monkeypatch.setattr(other, "leaders", lambda: looks.pop() if looks else bucket.leaders())
    with pytest.raises(ValueError, match="another process became the syncer of epoch 3 at the same time"):
        other.lead(3, "run", "")
    # Somebody deletes the claim, and a second process makes one: the first one must not take it back.
    bucket.store.delete([names.leader(3)])
    monkeypatch.undo()
    second = other.lead(3, "run", "")
    assert bucket.lead_on(first) == second and bucket.leader() == second


def test_a_claim_that_is_deleted_or_damaged_is_made_again(bucket: Bucket) -> None:
    older = bucket.lead(1, "run", "")
    ours = bucket.lead(2, "run", "")
    for spoil in (lambda: bucket.store.delete([names.leader(2)]), lambda: bucket.store.put(names.leader(2), b"x" * 99)):
        spoil()
        assert bucket.leader() == older
        assert bucket.lead_on(ours) is None and bucket.leader() == ours


def test_claims_of_strangers_are_passed_over_and_deleted(bucket: Bucket, tmp_path: Path) -> None:
    ours = bucket.lead(1, "run", "")
    stranger = with_token(bucket, tmp_path, "b")
    stranger.write(names.leader(999_999), b"{}")
    bucket.store.put(names.leader(names.EPOCH_MAX), bytes(5000))
    bucket.store.put(f"{names.LEADER}{'9' * 40}", b"no number of an epoch")
    # An object of the run that was copied to another name.
    bucket.store.put(names.leader(7), bucket.store.get(names.leader(1), 9999) or b"")
    assert bucket.leader() == ours
    assert bucket.lead_on(ours) is None
    assert bucket.store.list(names.LEADER) == sorted([names.leader(1), f"{names.LEADER}{'9' * 40}"])


@pytest.mark.parametrize("claim", [b"{}", b"[]", b"\xff", b'{"run_id": "run"}'])
def test_a_leader_of_another_release_leads(bucket: Bucket, claim: bytes) -> None:
    """It has the run's token, so it is neither passed over nor deleted, which would make two syncers decide."""
    ours = bucket.lead(1, "run", "5eed")
    bucket.write(names.leader(2), claim)
    found = bucket.leader()
    assert found is not None and found.epoch == 2 and bucket.lead_on(ours) == found
    assert bucket.leader() == found
    with pytest.raises(ValueError, match=r"has objects of run 'of another release' \(no id\): use another prefix"):
        bucket.lead(3, "run", "5eed")


def test_the_bucket_of_another_token_is_not_taken(bucket: Bucket, tmp_path: Path) -> None:
    with_token(bucket, tmp_path, "a").lead(1, "run", "")
    for other in (bucket, with_token(bucket, tmp_path, "b")):
        with pytest.raises(ValueError, match=r"has leader/0+1, which is damaged or of another run: use that run's"):
            other.lead(2, "run", "")
        with pytest.raises(TransportError, match=r"leader/0+1 is damaged or of another run: use that syncer's"):
            await_leader(other, 0.0)


class Loses:
    """A store that does what it is asked, and whose answer gets lost."""

    def __init__(self, inner: Any, times: int) -> None:
        self.inner, self.times = inner, times

    def __getattr__(self, name: str) -> Any:
        def do(*args: Any) -> Any:
            done = getattr(self.inner, name)(*args)
            if self.times > 0:
                self.times -= 1
                raise StoreError(f"no answer to {name}")
            return done

        return do


def test_a_process_recognises_what_it_created(bucket: Bucket) -> None:
    real = bucket.store
    bucket.store = Loses(real, 1)  # type: ignore[assignment]
    with pytest.raises(StoreError):
        bucket.create("a", b"content")
    bucket.store = Loses(real, 3)  # type: ignore[assignment]
    assert bucket.create("b", b"content", 1e18)
    assert not bucket.create("b", b"content", 1e18), "another process has created the same content"
    assert not bucket.create("a", b"x")


def test_what_could_not_be_deleted_is_deleted_later(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        bucket.write(name, b"")

    def fail(keys: list[str]) -> None:
        raise StoreError(str(keys))

    with monkeypatch.context() as patched:
        patched.setattr(bucket.store, "delete", fail)
        bucket.discard(["a"])
        bucket.discard(["b"])
    assert bucket.store.list("") == ["a", "b", "c"]
    bucket.discard(["c"])
    assert bucket.store.list("") == []


def test_a_listing_of_what_is_deleted_ends(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("e/1/a", "e/1/b", "e/10/c"):
        bucket.write(name, b"")
    assert bucket.delete_below("e/1/") == 2 and bucket.store.list("") == ["e/10/c"]
    monkeypatch.setattr(bucket.store, "list", lambda _: ["e/1/a"])
    assert bucket.delete_below("e/1/") == 1


def test_an_object_is_read_only_as_written(bucket: Bucket) -> None:
    assert bucket.write("a", b"one", memoryview(b"two")) > 6
    assert bucket.read("a", 6) == b"onetwo" and bucket.read("b", 6) is None
    with pytest.raises(ValueError, match="the limit is"):
        bucket.read("a", 5)
    bucket.store.put("b", bucket.store.get("a", 99) or b"")
    with pytest.raises(Unsealed):
        bucket.read("b", 6)
