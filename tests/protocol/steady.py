"""Settings of property tests: the same examples every time, and no clock that fails on a busy machine."""

from hypothesis import HealthCheck, settings

STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
