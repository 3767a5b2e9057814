"""The checks of `diloco doctor` on a bucket: what works, a store without conditional writes, another run, no access."""

from pathlib import Path

import pytest

from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.doctor.bucket import check_bucket
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.store.bucket import Bucket

CONFIG = RunConfig(name="ours")


def found(transport: TransportConfig) -> dict[str, tuple[str, str]]:
    """Return status and text of each check by name."""
    return {check.name: (check.status, check.found + check.fix) for check in check_bucket(CONFIG, transport)}


@pytest.fixture
def transport(tmp_path: Path) -> TransportConfig:
    return TransportConfig(address=f"file://{tmp_path}/bucket", poll_s=60.0)


def test_a_bucket_that_works_is_left_as_it_was(transport: TransportConfig) -> None:
    checks = found(transport)
    assert {name: status for name, (status, _) in checks.items()} == dict.fromkeys(
        ("credentials", "bucket", "syncer"), "ok"
    )
    assert "a write takes" in checks["bucket"][1] and "no syncer leads" in checks["syncer"][1]
    assert Bucket(transport).store.list("") == []
    Bucket(transport).lead(4, "ours", "id")
    assert found(transport)["syncer"] == ("ok", "the syncer of epoch 4 leads run 'ours'")


def test_another_run_and_a_store_that_overwrites_are_found(
    transport: TransportConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bucket(transport).lead(4, "theirs", "id")
    status, text = found(transport)["syncer"]
    assert status == "fail" and "'theirs'" in text and "diloco clean" in text
    create = Bucket.create
    monkeypatch.setattr(Bucket, "create", lambda self, *what: create(self, *what) or True)
    assert found(transport)["leadership"][0] == "fail"


def test_a_bucket_without_access_or_secret_is_one_failed_check(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checks = found(TransportConfig(address=f"file://{tmp_path}/file/bucket"))
    assert checks["bucket"][0] == "fail"
    checks = found(TransportConfig(address="s3://b/p"))
    assert list(checks) == ["bucket"] and "set transport.token_file" in checks["bucket"][1]
