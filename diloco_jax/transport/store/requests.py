"""Questions to a syncer through a bucket: what `diloco status`, `diloco drain` and a subscriber's start ask.

The caller writes the question at the entrance, and looks for the answer at a name that it has drawn.
"""

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from diloco_jax.protocol.texts import REASON_LENGTH_MAX, clean
from diloco_jax.transport.link import TransportConfig, TransportError
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket, Leader
from diloco_jax.transport.store.seal import Unsealed
from diloco_jax.transport.store.store import StoreError, TooLarge

QUESTION_BYTES_MAX = 4096
# The status of ten thousand learners, and a config with its layout.
ANSWER_BYTES_MAX = 16 << 20


def await_leader(bucket: Bucket, until_s: float, over: Callable[[], bool] = lambda: False) -> Leader:
    """Return the newest leader, waiting for one until `until_s` on the monotonic clock.

    Raises:
        TransportError: There was none in time; with the store's error if it did not answer.
    """
    trouble = "it has no syncer"
    while not over():
        try:
            found, unreadable = bucket.leaders()
            if found is not None:
                return found
            if unreadable:
                trouble = f"{unreadable[0]} is damaged or of another run: use that syncer's transport.token_file"
        except StoreError as error:
            trouble = str(error)
        if time.monotonic() >= until_s:
            break
        time.sleep(min(bucket.config.poll_s, max(0.0, until_s - time.monotonic())))
    raise TransportError(
        f"no syncer answered at {bucket.config.address} within {bucket.config.connect_timeout_s:g} s ({trouble}): "
        "start it, correct that address, or raise transport.connect_timeout_s"
    )


def ask_in_bucket(config: TransportConfig, method: str, request: bytes, read: Callable[[bytes], Any], name: str) -> Any:
    """Ask the syncer, and return its answer, as `calls.ask` does.

    Args:
        name: Name of the caller.

    Raises:
        TransportError: Nobody answered in time, or the syncer refused.
        ValueError: The bucket cannot be used.
    """
    bucket = Bucket(config)
    until_s = time.monotonic() + config.connect_timeout_s
    leader = await_leader(bucket, until_s)
    number = secrets.token_hex(12)
    key = f"{names.entrance(leader.epoch)}{names.ASK}{number}"
    question = pb.Question(method=method, name=name, request=request).SerializeToString()
    bucket.write(key, question)
    try:
        while time.monotonic() < until_s:
            # Somebody else's object may be in the answer's place until the answer replaces it.
            with contextlib.suppress(StoreError, TooLarge, Unsealed):
                content = bucket.read(names.answer(leader.epoch, number), ANSWER_BYTES_MAX)
                if content is not None:
                    return _read_answer(config, content, read)
            time.sleep(min(config.poll_s, 0.5))
    finally:
        # The syncer deletes what it has answered. This one may be left because nobody answers.
        with contextlib.suppress(StoreError):
            bucket.store.delete([key])
    raise TransportError(
        f"the syncer at {config.address} did not answer within {config.connect_timeout_s:g} s: see its log, or raise "
        "transport.connect_timeout_s"
    )


def _read_answer(config: TransportConfig, content: bytes, read: Callable[[bytes], Any]) -> Any:
    try:
        answer = pb.Answer.FromString(content)
        if not answer.problem:
            return read(answer.reply)
    except DecodeError as error:
        raise TransportError(f"the syncer at {config.address} is of another release: {error}") from None
    raise TransportError(f"the syncer at {config.address} cannot answer: {clean(answer.problem, REASON_LENGTH_MAX)}")
