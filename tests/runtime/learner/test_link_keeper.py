"""The link thread of a learner whose connection is refused for good."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import MagicMock

import pytest

from diloco_jax.runtime.learner.decisions import Signals
from diloco_jax.runtime.learner.inbox import LinkKeeper
from diloco_jax.transport.link import Rejected


def test_a_learner_that_is_refused_for_good_says_why() -> None:
    decisions, outbox, dialler = MagicMock(over=False), MagicMock(), MagicMock()
    outbox.link.receive.return_value.kind = "disconnected"
    outbox.close_link.side_effect = lambda _: setattr(outbox, "link", None)
    decisions.ask.side_effect = lambda _: (None, outbox.link)
    dialler.connect.side_effect = Rejected("a newer process has this name")
    signals, other = Signals(threading.Event()), MagicMock()
    link: Any = LinkKeeper(other, decisions, other, outbox, dialler, signals)
    link.run()
    with pytest.raises(Rejected, match="a newer process"):
        signals.check()
