"""Encryption of objects in a bucket, so that its owner need not be trusted.

Every object is sealed with AES-256-GCM under a key that only the run's processes know, from `transport.token_file`. The
object's name is authenticated with it, so an object that somebody copies to another name, or makes without the key, is
refused. Without a token the key is public: it shows damage, and hides nothing.
"""

import os
from collections.abc import Sequence
from typing import Any

NONCE_BYTES, TAG_BYTES = 12, 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES
_PURPOSE = b"diloco objects of a bucket, 1"
# The key of runs without a token.
_PUBLIC = b"diloco without a token"


class Unsealed(ValueError):
    """An object is damaged, of another run, or at another name than its own."""


class Seal:
    """The key of one run.

    Args:
        token: The secret that all processes of the run share; b"" for none.

    Raises:
        ValueError: The package cryptography is not installed.
    """

    def __init__(self, token: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError:
            raise ValueError("a bucket needs the package cryptography: pip install 'diloco-jax[bucket]'") from None
        key = HKDF(SHA256(), 32, salt=None, info=_PURPOSE).derive(token or _PUBLIC)
        self._cipher: Any = AESGCM(key)

    def close(self, key: str, parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
        """Return the bytes of the object `key` with this content."""
        nonce = os.urandom(NONCE_BYTES)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return nonce + self._cipher.encrypt(nonce, data, key.encode())

    def open(self, key: str, data: bytes | bytearray | memoryview) -> bytes:
        """Return the content of the object `key`; Unsealed if it is not what the run's processes wrote there."""
        from cryptography.exceptions import InvalidTag

        view = memoryview(data)
        try:
            opened: bytes = self._cipher.decrypt(view[:NONCE_BYTES], view[NONCE_BYTES:], key.encode())
        except (InvalidTag, ValueError):
            raise Unsealed(
                f"the object {key} is damaged, or not written with this run's token: use the same "
                "transport.token_file on all sides, and a prefix in the bucket that only this run writes to"
            ) from None
        return opened
