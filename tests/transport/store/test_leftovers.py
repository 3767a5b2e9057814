"""What a run leaves in a bucket is told from other objects by its name, and a live syncer by its sign."""

from pathlib import Path

import pytest

from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.store import leftovers, names
from diloco_jax.transport.store.bucket import Bucket
from diloco_jax.transport.store.leftovers import delete_left, find_left, is_alive
from diloco_jax.transport.store.store import ObjectStore

HEADER = pb.Header(sender="a.b-c_d", incarnation=1700000000000, session=5, host=3)
SESSION = names.session(7, names.session_name(HEADER))
OURS = [
    names.leader(7),
    names.alive(7),
    f"{names.entrance(7)}{names.HELLO}{names.session_name(HEADER)}",
    f"{names.entrance(7)}{names.FOLLOW}{names.session_name(HEADER)}",
    f"{names.entrance(7)}{names.ASK}00ff",
    names.answer(7, "00ff"),
    names.in_stream(SESSION, names.UP, 1),
    names.in_stream(SESSION, names.DOWN, 12),
    names.payload(7, SESSION, names.UP, names.reference("s", 2)),
    names.payload(7, SESSION, names.DOWN, names.reference("v", 3)),
    names.on_tape(7, 1234),
    names.base(7),
    f"{names.snapshot(100, 7)}{names.MANIFEST}",
]
OTHERS = ["x", "leader/7", "leader/000000000009/x", "e/7/other", "e/x/v/000000000001", f"a/{OURS[0]}", "tape.jsonl"]


def test_names_of_a_run_are_told_from_others() -> None:
    assert [key for key in OURS if not names.is_ours(key)] == []
    assert [key for key in OTHERS if names.is_ours(key)] == []
    assert [names.epoch_of(key) for key in OURS[:10]] == [7] * 10
    assert [names.epoch_of(key) for key in (*OURS[10:], "x", "e/", "leader/x")] == [-1] * 6


def test_what_is_left_is_shown_and_deleted(tmp_path: Path) -> None:
    config = TransportConfig(address=f"file://{tmp_path}/bucket", token_file=str(tmp_path / "token"))
    (tmp_path / "token").write_text("secret")
    bucket, store = Bucket(config), ObjectStore(config.address)
    for key in OURS[1:] + OTHERS:
        store.put(key, b"x")
    leader = bucket.lead(7, "run", "id")
    left = find_left(config)
    assert sorted(left.ours) == sorted(OURS) and left.ours[-1] == names.leader(7) and left.others == len(OTHERS)
    assert (left.epoch, left.leader, left.copied) == (7, leader, 3) and left.sign_s_ago is not None
    stranger = find_left(TransportConfig(address=config.address))
    assert (stranger.epoch, stranger.leader, stranger.ours) == (7, None, left.ours)
    assert delete_left(config) == len(OURS)
    assert sorted(store.list("")) == sorted(OTHERS)
    assert find_left(config) == ([], len(OTHERS), None, None, None)


def test_a_syncer_is_alive_while_its_sign_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransportConfig(address="memory://alive")
    store = ObjectStore(config.address)
    assert not is_alive(config, 1.0), "nobody has led"
    store.put(names.alive(2), b"1")
    assert not is_alive(config, 0.1)
    monkeypatch.setattr(leftovers.time, "sleep", lambda _: store.delete([names.alive(2)]))
    assert not is_alive(config, 0.1), "it has ended"
    store.put(names.alive(2), b"1")
    monkeypatch.setattr(leftovers.time, "sleep", lambda _: store.put(names.alive(2), b"2"))
    assert is_alive(config, 60.0)
    monkeypatch.setattr(leftovers.time, "sleep", lambda _: store.put(names.alive(3), b"1"))
    assert is_alive(config, 60.0), "a later syncer has begun"
