"""Counted requests to a bucket as a number and as a text; fast to import, because `diloco status` shows them."""

from collections.abc import Mapping

WORDS = {"puts": "writes", "gets": "reads", "misses": "reads of nothing", "lists": "lists", "deletes": "deletes"}


def calls(requests: Mapping[str, int]) -> int:
    """Return the number of requests in counters by name (`Requests.as_dict`)."""
    return sum(requests.get(name, 0) for name in WORDS)


def requests_text(requests: Mapping[str, int]) -> str:
    """Return the requests so far by kind, and the bytes of their objects."""
    kinds = ", ".join(f"{word} {requests.get(name, 0):,}" for name, word in WORDS.items())
    sent, received = (requests.get(name, 0) / 1e6 for name in ("sent_bytes", "received_bytes"))
    return f"{calls(requests):,} requests to the bucket ({kinds}); {sent:,.1f} MB written, {received:,.1f} MB read"
