"""Requests of an operator about one learner: drain, ban or admit it, from any thread to the driver's thread."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from diloco_jax.transport.session.sessions import CLOSING

DRAIN, BAN, ADMIT = "drain", "ban", "admit"
WAITING_MAX = 16
# The listener answers before the client's own timeout ends.
OPERATOR_ANSWER_S = 3.0


class OperatorRequest(NamedTuple):
    """Request of an operator about a learner."""

    # DRAIN, BAN or ADMIT.
    action: str
    learner_id: str
    # Reason of a ban.
    why: str = ""


Operate = Callable[[OperatorRequest], str]


class OperatorRequests:
    """The requests that wait for the driver; `wake` ends its wait for messages."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: deque[tuple[OperatorRequest, Future[tuple[bool, str]]]] = deque()
        self._closed = False

    def ask(self, request: OperatorRequest) -> tuple[bool, str]:
        """Let the driver do it, and return whether it did and its answer; not on the driver's own thread."""
        waiting = request, Future[tuple[bool, str]]()
        with self._lock:
            if self._closed:
                return False, CLOSING
            if len(self._waiting) >= WAITING_MAX:
                return False, f"{WAITING_MAX} requests of operators are waiting; ask again later"
            self._waiting.append(waiting)
        self._wake()
        try:
            return waiting[1].result(OPERATOR_ANSWER_S)
        except TimeoutError:
            with self._lock:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
                    return False, f"the syncer was busy for {OPERATOR_ANSWER_S:g} s and did nothing; ask again"
            return False, f"the syncer has begun but did not end within {OPERATOR_ANSWER_S:g} s; see `diloco status`"

    def answer(self, operate: Operate | None) -> None:
        """Answer the waiting requests; on the driver's own thread."""
        while self._waiting:
            with self._lock:
                # The caller gave up.
                if not self._waiting:
                    return
                request, answer = self._waiting.popleft()
            try:
                if operate is None:
                    raise ValueError(f"this syncer cannot {request.action} learners")
                answer.set_result((True, operate(request)))
            except ValueError as error:
                answer.set_result((False, str(error)))
            # The driver handles other errors, but the caller must not wait for them.
            finally:
                if not answer.done():
                    answer.set_result((False, "the syncer failed; see its log"))

    def close(self) -> None:
        """Refuse every later request."""
        with self._lock:
            self._closed = True
