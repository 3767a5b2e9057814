"""Sealed objects: only the run's processes can make one, and only for its own name."""

import pytest

from diloco_jax.transport.store.seal import SEAL_BYTES, Seal, Unsealed


def test_what_is_sealed_can_be_opened_at_its_name() -> None:
    seal = Seal(b"secret")
    for parts in ([b""], [b"one"], [b"one", memoryview(b"two"), bytearray(b"three")]):
        data = seal.close("a/b", parts)
        assert len(data) == sum(map(len, parts)) + SEAL_BYTES
        assert Seal(b"secret").open("a/b", data) == b"".join(parts)
        assert seal.close("a/b", parts) != data, "equal contents must not look equal"
    assert b"one" not in seal.close("a/b", [b"one"])


def test_everything_else_is_refused() -> None:
    seal = Seal(b"secret")
    data = seal.close("a/b", [b"content"])
    damaged = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for other in (*damaged, data[:-1], data + b"x", data[1:], b"", b"x", bytes(SEAL_BYTES)):
        with pytest.raises(Unsealed, match="the object a/b is damaged, or not written with this run's token"):
            seal.open("a/b", other)
    for key in ("a/c", "", "a/b/"):
        with pytest.raises(Unsealed):
            seal.open(key, data)
    for token in (b"other", b""):
        with pytest.raises(Unsealed):
            Seal(token).open("a/b", data)
