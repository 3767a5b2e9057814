"""How property tests run: the same examples every time, and no clock that a busy machine could make them fail by."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
