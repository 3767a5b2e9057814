"""Whatever arrives from the network: refused or harmless, never a crash, never believed when it was forged."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.transport import wire
from diloco_jax.transport.trust import security
from tests.drawn import examples
from tests.fuzz import targets
from tests.fuzz.inputs import mutate
from tests.fuzz.targets import FRAMES, PAYLOAD, TARGETS, read_stripe, stripe_frames

# All other targets are fast.
INPUTS = {"syncer_machine": 60, "learner_machine": 100, "tape": 100}


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_their_mutations(name: str) -> None:
    target, number = TARGETS[name], random.Random(0)
    for data in target.seeds:
        target.run(data)
    for _ in range(INPUTS.get(name, 500)):
        target.run(mutate(number, target.seeds))


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_any_bytes(name: str, data: st.DataObject) -> None:
    TARGETS[name].run(data.draw(st.binary(max_size=120)))


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_frames_cut_swapped_and_repeated(data: st.DataObject) -> None:
    """Frames that are each valid, in an order that is not: nothing but the right payload ever comes out."""
    frames = data.draw(st.lists(st.sampled_from(FRAMES), max_size=8))
    with contextlib.suppress(wire.WireError):
        came = [delivery.payload for delivery in read_stripe(b"".join(frames), encrypted=True)]
        assert came in ([], [PAYLOAD])


def finds(name: str) -> bool:
    number = random.Random(0)
    try:
        for _ in range(300):
            TARGETS[name].run(mutate(number, TARGETS[name].seeds))
    except Exception:
        return True
    return False


@pytest.mark.parametrize(
    ("target", "where", "check"),
    [
        ("forged_control", wire.Reader, "_check"),
        ("forged_stripe", wire, "check_head"),
        ("forged_stripe", wire, "check_data"),
        ("forged_digested", wire, "check_head"),
    ],
)
def test_a_reader_without_checksums_is_found(
    target: str, where: object, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not finds(target)
    monkeypatch.setattr(where, check, lambda *_: None)
    assert finds(target)


def test_a_reader_that_believes_any_header_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not finds("forged_header")

    class Anything:
        sender, incarnation = "a", 1

        def __ne__(self, other: object) -> bool:
            return False

    right = wire.Reader.__init__

    def init(self: wire.Reader, *arguments: object) -> None:
        right(self, *arguments)  # type: ignore[arg-type]
        self._header = Anything()  # type: ignore[assignment]

    monkeypatch.setattr(wire.Reader, "__init__", init)
    assert finds("forged_header")


def test_a_gate_that_compares_only_the_beginning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not finds("token")
    monkeypatch.setattr(security.hmac, "compare_digest", lambda sent, right: right.startswith(sent) or sent == right)
    assert finds("token")


def test_a_reader_that_takes_any_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    large = b"".join(stripe_frames(bytes(2000), 300))
    TARGETS["stripe"].run(large)
    right = targets.TransportConfig
    monkeypatch.setattr(targets, "TransportConfig", lambda **_: right(payload_bytes_max=1 << 20))
    with pytest.raises(AssertionError):
        TARGETS["stripe"].run(large)
