"""What a syncer does before it listens."""

import resource

import pytest

from diloco_jax.runtime.syncer import listening


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, (4096, 4096)),
        (1024, 1 << 20, (1 << 16, 1 << 20)),
        (1024, resource.RLIM_INFINITY, (1 << 16, resource.RLIM_INFINITY)),
        (4096, 4096, None),
        (1 << 17, 1 << 20, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_soft_limit_of_files_is_raised_within_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None
) -> None:
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changes.append(limits))
    listening.raise_file_limit()
    assert changes == ([] if raised is None else [raised])
