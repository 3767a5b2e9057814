"""Names in certificates, and defects of certificates, for code that does not read certificates itself."""

from collections.abc import Iterable

from diloco_jax.transport.link import ISLAND_HOSTS, SUBSCRIBER

LEARNER_URI, SUBSCRIBER_URI = "diloco://learner/", "diloco://subscriber/"


class Defect(ValueError):
    """Defect of a certificate or key; the caller knows the setting that named the file."""


class OutOfDate(Defect, ConnectionError):
    """A certificate that has expired or is not valid yet; an attempt after its renewal can succeed."""


def learner_names(common_name: str, dns: Iterable[str], uris: Iterable[str]) -> set[str]:
    """Return the learners that a certificate with these names represents; a subscriber is `subscriber/NAME`."""
    dns = [name for name in dns if not name.endswith(ISLAND_HOSTS)]
    prefixes = {LEARNER_URI: "", SUBSCRIBER_URI: SUBSCRIBER}
    told = {role + uri.removeprefix(start) for uri in uris for start, role in prefixes.items() if uri.startswith(start)}
    return told | set(dns) or {common_name}
