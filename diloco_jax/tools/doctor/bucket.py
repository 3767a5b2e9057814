"""Checks of `diloco doctor` on a bucket: what this machine may do there, how long it takes, and who leads the run."""

import secrets
import statistics
import time

from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.doctor.machine import Check, of_error
from diloco_jax.transport.link import TransportConfig, bucket_scheme
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import LOCAL, Bucket
from diloco_jax.transport.store.store import StoreError

# Requests of each kind that are timed.
TRIES = 5
# Processes of a run start with epoch 1, so nobody looks at these names, and `diloco clean` knows them.
EPOCH = 0
BYTES_MAX = 1024


def check_bucket(config: RunConfig, transport: TransportConfig) -> list[Check]:
    """Check the bucket of a run from this machine, with objects that are deleted again."""
    try:
        bucket = Bucket(transport)
    except ValueError as error:
        return [of_error("bucket", error)]
    checks = [_check_secrecy(transport)]
    try:
        checks += _check_requests(bucket)
        checks.append(_check_leader(config, bucket))
    except (StoreError, ValueError) as error:
        fix = "correct the address, the credentials in the environment, or what they allow (docs/bucket.md)"
        checks.append(Check("bucket", "fail", str(error), fix))
    return checks


def _check_secrecy(transport: TransportConfig) -> Check:
    if transport.token_file:
        return Check("credentials", "ok", "objects are encrypted with the run's token")
    if bucket_scheme(transport.address) in LOCAL:
        return Check("credentials", "ok", "objects are not encrypted, and stay in this folder")
    fix = "set transport.token_file (`diloco certs`), unless all who use the bucket may read and change the run"
    return Check("credentials", "warn", f"objects in {transport.address} are not encrypted", fix)


def _check_requests(bucket: Bucket) -> list[Check]:
    """Create, read, overwrite, list and delete an object, and time it."""
    keys = [names.answer(EPOCH, f"doctor{secrets.token_hex(8)}") for _ in range(TRIES)]
    written_s, read_s = [], []
    try:
        for key in keys:
            began_s = time.monotonic()
            if not bucket.create(key, b"doctor"):
                raise StoreError(f"{key} exists already")
            written_s.append(time.monotonic() - began_s)
            began_s = time.monotonic()
            if bucket.read(key, BYTES_MAX) != b"doctor":
                raise StoreError(f"{key} cannot be read after it was written")
            read_s.append(time.monotonic() - began_s)
        exclusive = not bucket.create(keys[0], b"other")
        bucket.write(keys[0], b"second")
        listed = keys[0] in bucket.store.list(names.answer(EPOCH, ""))
    finally:
        bucket.store.delete(keys)
    write_s, look_s = statistics.median(written_s), statistics.median(read_s)
    took = f"a write takes {write_s * 1000:.3g} ms, a read {look_s * 1000:.3g} ms (medians of {TRIES})"
    checks = [Check("bucket", "ok", f"{bucket.config.address} can be written, read, listed and deleted from; {took}")]
    if not exclusive:
        fix = "use a store with conditional writes: S3, Google Cloud Storage, Azure, or one that supports If-None-Match"
        checks.append(Check("leadership", "fail", "of two processes that create one object, both succeed", fix))
    if not listed:
        fix = "allow listing below the prefix; the syncer looks for islands that way"
        checks.append(Check("listing", "fail", "an object that was written is not listed", fix))
    if write_s + look_s > bucket.config.poll_s:
        fix = f"raise transport.poll_s above {write_s + look_s:.2g}; a message takes about that long anyway"
        checks.append(Check("poll_s", "warn", f"transport.poll_s is {bucket.config.poll_s:g}, less than both", fix))
    return checks


def _check_leader(config: RunConfig, bucket: Bucket) -> Check:
    leader = bucket.leader()
    if leader is None:
        return Check("syncer", "ok", "no syncer leads a run there; islands wait for one")
    if leader.run_id != config.name:
        fix = f"use another prefix, or remove an ended run's objects with `diloco clean {bucket.config.address}`"
        return Check("syncer", "fail", f"the bucket has run {leader.run_id!r}, and this config is {config.name!r}", fix)
    return Check("syncer", "ok", f"the syncer of epoch {leader.epoch} leads run {leader.run_id!r}")
