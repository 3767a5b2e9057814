"""Refused callers get few lines in the log, and none of them is lost without a count."""

import pytest

from diloco_jax.transport.session.refusals import CALLER_MAX, PAIRS_MAX, PAUSE_S, Refusals


def test_a_pair_has_one_line_in_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    refusals = Refusals(lambda: clock[0])
    for second in range(130):
        clock[0] = float(second)
        refusals.tell("10.0.0.7", "the token was not sent")
        refusals.tell("10.0.0.8", "the token was not sent")
    first, again = (
        [f"refused {caller}: the token was not sent{more}" for caller in ("10.0.0.7", "10.0.0.8")]
        for more in ("", f" ({PAUSE_S - 1:.0f} more times since the last line)")
    )
    assert caplog.messages == [*first, *again, *again]


def test_many_callers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    refusals = Refusals(lambda: clock[0])
    for number in range(1000):
        refusals.tell(f"10.0.0.{number}", "no")
    assert len(caplog.messages) == PAIRS_MAX == len(refusals._pairs)
    clock[0] = PAUSE_S
    refusals.tell("10.0.0.999", "no")
    assert caplog.messages[-1] == f"refused 10.0.0.999: no ({1000 - PAIRS_MAX} other refusals had no line)"
    assert len(refusals._pairs) == PAIRS_MAX


def test_a_forwarded_call_belongs_to_its_caller() -> None:
    refusals = Refusals()
    refusals.forwards("ipv4:127.0.0.1:5", "10.0.0.7")
    refusals.forwards("ipv4:127.0.0.1:6", "10.0.0.8")
    assert refusals.caller_of("ipv4:127.0.0.1:5") == "10.0.0.7"
    assert refusals.caller_of("ipv4:10.0.0.9:7") == "10.0.0.9", "nobody forwarded it"
    assert refusals.caller_of("ipv6:%5B::1%5D:7") == "::1"
    assert refusals.ended("ipv4:127.0.0.1:5") and not refusals.ended("ipv4:127.0.0.1:6")
    assert not (refusals._callers or refusals._called)


def test_a_caller_with_many_reasons_leaves_places_for_others(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(lambda: 0.0)
    for number in range(1000):
        refusals.tell("10.0.0.7", f"epoch {number} is unknown")
    for word in ("one", "two", "three", "four", "five"):
        refusals.tell("10.0.0.7", f"{word}\nrefused 10.0.0.8: forged")
    refusals.tell("10.0.0.9", "another reason")
    assert len(caplog.messages) == CALLER_MAX + 1 and not any("\n" in line for line in caplog.messages)
    assert caplog.messages[-1].startswith("refused 10.0.0.9: another reason")
