"""A fake of Google Cloud Storage on loopback, PyPI's `gcp-storage-emulator`, and the token store in its bucket."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from diloco_jax.runtime.local.processes import free_address
from rehearsal.shrink import BUCKET

CORPUS = "[a-i]*.py"  # of Python's standard library: 2 MB


@contextmanager
def bucket(root: Path) -> Iterator[dict[str, str]]:
    """Serve a bucket with a corpus, made as an operator would; yields the environment with which gcsfs finds it."""
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    host, port = free_address().split(":")
    server = create_server(host, int(port), in_memory=True, default_bucket=BUCKET.removeprefix("gs://"))
    server.start()
    # without the second one gcsfs asks by gRPC, which the emulator does not speak, for a minute
    environment = {"STORAGE_EMULATOR_HOST": f"http://{host}:{port}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    os.environ.update(environment)
    try:
        words = ["tokenize", sysconfig.get_path("stdlib"), "--patterns", CORPUS, "--tokenizer", "bytes"]
        store = root / "corpus"
        subprocess.run(
            [sys.executable, "-m", "diloco_jax", *words, "--out", str(store)], check=True, stdout=subprocess.DEVNULL
        )
        fsspec.filesystem("gs").put(f"{store}/", f"{BUCKET}/corpus/", recursive=True)
        yield environment
    finally:
        server.stop()
