"""A learner's side of a bucket: how it finds its syncer, and how its sessions end."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from diloco_jax.protocol import messages as m
from diloco_jax.transport import wire
from diloco_jax.transport.bucket import stream
from diloco_jax.transport.bucket.listener import BucketListener
from diloco_jax.transport.bucket.session import BucketSession
from diloco_jax.transport.bucket.stream import Shared
from diloco_jax.transport.endpoints.ends import connect
from diloco_jax.transport.link import LinkClosed, Rejected, TransportConfig, TransportError
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.store import names, store
from diloco_jax.transport.store.bucket import Bucket
from diloco_jax.transport.store.store import ObjectStore
from tests.limits import HANGS_S
from tests.transport.bucket.conftest import POLL_S
from tests.transport.ends import Ends, comes_true, greet, hear, hear_end, hear_message, value
from tests.transport.test_hosts import send_parts


def ours() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("diloco-")}


def test_a_folder_is_a_bucket(folder: str) -> None:
    ends = Ends(address=folder, poll_s=POLL_S)
    try:
        listener = ends.listen()
        links = {name: ends.meet(name) for name in "ab"}
        for number in range(20):
            for name, link in links.items():
                link.send(m.Leave(name, 0, str(number)))
            links["a"].send(value(number, 1000), bytes([number]) * 1000)
        heard = [hear(listener) for _ in range(60)]
        for name in links:
            reasons = [each.message.reason for each in heard if each.peer == name and isinstance(each.message, m.Leave)]
            assert reasons == [str(number) for number in range(20)]
        values = [each for each in heard if isinstance(each.message, m.FragmentValue)]
        assert [bytes(each.payload) for each in values] == [bytes([number]) * 1000 for number in range(20)]
    finally:
        ends.close()
    assert ObjectStore(folder).list("") == []


def test_large_payloads_travel_in_pieces_both_ways(
    ends: Ends, listener: BucketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PIECE_BYTES", 1000)
    link, payload = ends.connect(), bytes(range(256)) * 20
    link.send(value(2, len(payload)), [payload[:7], memoryview(payload)[7:]])
    up = hear(listener).payload
    assert up == payload
    assert listener.send("a", m.GlobalFragment(5, 1, 4, 1, 99, len(payload)), up)
    assert hear(link).payload == payload


def test_without_a_syncer_a_learner_gives_up_in_time_and_leaves_nothing(ends: Ends, address: str) -> None:
    ends.config = replace(ends.config, connect_timeout_s=0.05)
    with pytest.raises(TransportError, match=r"no syncer answered at memory://.* within 0\.05 s \(it has no syncer\)"):
        ends.connect(to=address)
    Bucket(ends.config).lead(1, "run", "")
    for _ in range(3):
        with pytest.raises(
            TransportError, match=r"the syncer of epoch 1 at .* did not answer within 0\.05 s"
        ) as caught:
            ends.connect(to=address)
        assert not isinstance(caught.value, Rejected)
    assert comes_true(lambda: ObjectStore(address).list("") == [names.leader(1)])
    # A syncer that starts later finds nobody who has given up.
    assert comes_true(lambda: not ours())


def test_a_learner_that_gave_up_may_try_again(
    ends: Ends, listener: BucketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(TransportError, match="did not answer"):
        patched.setattr(BucketSession, "wait_ready", lambda *_: False)
        ends.connect()
    # The syncer may have opened that session.
    link = ends.connect()
    link.send(m.Heartbeat("a", 0))
    assert comes_true(lambda: (each := listener.receive(POLL_S)) is not None and each.kind == "message")


def test_two_processes_of_one_name_and_number_do_not_both_win(ends: Ends, listener: BucketListener) -> None:
    link = ends.connect(number=7)
    with pytest.raises(TransportError, match="another process of 'a' has the same session") as caught:
        ends.connect(number=7)
    assert not isinstance(caught.value, Rejected)
    greet(listener, link)


def test_an_earlier_attempt_of_a_host_does_not_answer_a_later_one(ends: Ends) -> None:
    listener = ends.listen(connect_timeout_s=0.05)
    with pytest.raises(TransportError, match="no session of its leader"):
        ends.connect(number=7, host=1, hosts=2)
    leader = ends.connect(number=7, hosts=2)
    host = ends.connect(number=7, host=1, hosts=2)
    send_parts([leader, host], bytes(90))
    assert hear(listener).payload == bytes(90)


def test_the_syncer_of_the_newest_epoch_is_asked(ends: Ends, listener: BucketListener) -> None:
    newer = ends.listen(epoch=3)
    link = ends.connect(epoch=1)
    link.send(m.Heartbeat("a", 0))
    assert hear_message(newer) == m.Heartbeat("a", 0) and listener.receive(0) is None
    with pytest.raises(TransportError, match="has heard of epoch 9 of the syncer, this one is of epoch 3"):
        ends.connect("b", epoch=9)


@pytest.mark.parametrize("silent", ["learner", "syncer"])
def test_silence_ends_a_session(ends: Ends, hurried: None, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = ends.listen(keepalive_s=0.1, keepalive_timeout_s=0.1)
    link = ends.meet(keepalive_s=0.1, keepalive_timeout_s=0.1)
    time.sleep(0.4)
    greet(listener, link)
    session = link._session if silent == "learner" else listener._heard["a"]
    # A process that is killed neither writes nor reads.
    monkeypatch.setattr(session, "_put", lambda batch: False)
    hear_end(listener if silent == "learner" else link, "has written nothing for 0 s")


def test_no_thread_outlives_its_session(ends: Ends) -> None:
    # Threads of an earlier test may still end.
    assert comes_true(lambda: not ours())
    ends.listen()
    ends.meet()
    # Each of two ends writes and reads two lanes. One thread looks at the entrance, and one gives signs of life.
    assert comes_true(lambda: len(ours()) == 2 * 4 + 2) and all(each.daemon for each in ours())
    ends.close()
    assert comes_true(lambda: not ours())


def test_an_error_in_a_thread_ends_the_session(
    ends: Ends, listener: BucketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OverflowError("Data too long")

    for number, name in enumerate(("write_payload", "write", "next", "fetch")):
        link = ends.meet(incarnation=number)
        side = link._session._reader if name in ("next", "fetch") else link._session._writer
        with monkeypatch.context() as patched:
            patched.setattr(side, name, fail)
            if name == "fetch":
                listener.send("a", m.GlobalFragment(1, 0, 1, 1, 7, 3), b"abc")
            else:
                link.send(m.Leave("a", number, "wakes the writer"))
                link.send(value(1, 3, number), b"abc")
            hear_end(link, "the session with 'syncer' failed: OverflowError('Data too long')")
        listener._heard["a"].fail("the end of this case")
        while hear(listener).kind == "message":
            pass


def test_a_payload_above_the_readers_limit_ends_the_session(ends: Ends) -> None:
    listener = ends.listen(payload_bytes_max=100)
    link = ends.connect(payload_bytes_max=200)
    link.send(value(1, 101), bytes(101))
    hear_end(link, "a payload of 101 bytes, the limit is 100: raise transport.payload_bytes_max")
    hear_end(listener, "a payload of 101 bytes")


def test_an_entry_that_is_not_allowed_ends_the_session(ends: Ends, listener: BucketListener) -> None:
    body = wire.pack_body(value(1, 3))
    entries = {
        "refers to no payload": stream.bulk_entry(1, body, 3, "s/1"),
        "an entry names 3 bytes at ''": stream.bulk_entry(1, body, 3, ""),
        "a FragmentValue is not expected here": pb.Entry(frame=stream.bulk_entry(1, body, 3, "").frame),
        "a Stop is not expected here": stream.control_entry(wire.pack_body(m.Stop(1, ""))),
        "malformed frame": stream.control_entry(b"\xff"),
        "an entry of the bulk lane without a message": pb.Entry(bulk=True),
        "a payload on the control connection": stream.control_entry(
            pb.Frame(chunk=pb.Chunk(message=1)).SerializeToString()
        ),
    }
    for words, entry in entries.items():
        link = ends.meet()
        session = link._session
        with session._changed:
            session._entries.append(entry)
        hear_end(listener, words)
        hear_end(link, words)


def test_a_slow_upload_for_one_learner_does_not_keep_the_driver(address: str) -> None:
    bucket = Bucket(TransportConfig(address=address))
    writes, may = threading.Event(), threading.Event()
    write = bucket.write

    def slow(key: str, *parts: Any) -> int:
        writes.set()
        assert may.wait(HANGS_S)
        return write(key, *parts)

    bucket.write = slow  # type: ignore[method-assign]
    shared = Shared(bucket, 1, 1, [memoryview(b"abc")])
    shared.hold()
    upload = threading.Thread(target=shared.write)
    upload.start()
    assert writes.wait(HANGS_S)
    # These return before the upload ends.
    shared.hold()
    shared.release()
    may.set()
    upload.join(HANGS_S)
    assert shared.write() == 0 and bucket.store.list("") == ["e/1/v/000000000001"]
    shared.release()
    shared.release()
    assert bucket.store.list("") == []


def test_the_bulk_lane_is_bounded_in_the_bucket(ends: Ends, address: str) -> None:
    ends.listen(queue_payloads_max=2)
    link = ends.connect(queue_payloads_max=2)
    # The syncer's driver reads nothing: two are delivered, two are in the bucket, and two or three wait here.
    with pytest.raises(LinkClosed, match="the bulk queue to 'syncer' is full"):
        for number in range(100):
            link.send(value(number, 3), b"abc")
            time.sleep(0.02)
    assert number < 9


def test_what_is_dropped_is_not_followed_by_a_later_message(ends: Ends, listener: BucketListener) -> None:
    """Check that a payload which is being written when its session fails is deleted, and its message not sent."""
    link = ends.meet()
    session, writes, may = link._session, threading.Event(), threading.Event()
    write = session._writer.write_payload

    def slow(*arguments: Any) -> Any:
        writes.set()
        assert may.wait(HANGS_S)
        return write(*arguments)

    session._writer.write_payload = slow
    link.send(value(1, 3), b"abc")
    assert writes.wait(HANGS_S)
    session.fail("cut")
    may.set()
    hear_end(link, "cut")
    hear_end(listener, "cut")
    assert listener.receive(0) is None
    assert comes_true(lambda: not [key for key in ObjectStore(listener.address).list("") if "-p/" in key])


def test_connecting_needs_a_leader_of_this_token(ends: Ends, listener: BucketListener, tmp_path: Any) -> None:
    (tmp_path / "token").write_text("another secret of this length")
    there = replace(ends.there, token_file=str(tmp_path / "token"), connect_timeout_s=0.02)
    with pytest.raises(TransportError, match=r"damaged or of another run: use that syncer's transport\.token_file"):
        connect(there, run_id="run", learner_id="a", incarnation=0)


def test_an_idle_session_writes_only_signs_of_life(ends: Ends, listener: BucketListener) -> None:
    link = ends.meet()
    link.send(value(1, 3), b"abc")
    hear(listener)
    assert listener.send("a", m.Advance(1)) and hear_message(link) == m.Advance(1)
    # Both sides say what they have read, and then nothing.
    sides = link._session._writer, listener._heard["a"]._writer
    for _ in range(50):
        before = [each.number for each in sides]
        time.sleep(20 * POLL_S)
        if before == [each.number for each in sides]:
            return
    raise AssertionError("the two sides answer each other's answers")
