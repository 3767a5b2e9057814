"""Settings of property tests: by default the same examples every time, and no clock that fails on a busy machine."""

from hypothesis import HealthCheck, settings

from tests.drawn import TIMES

STEADY = settings(deadline=None, derandomize=TIMES == 1, suppress_health_check=[HealthCheck.too_slow])
