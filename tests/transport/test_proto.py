"""The generated code is that of the .proto file, and the .proto file that of the protocol."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_jax.transport import wire
from diloco_jax.transport.proto import diloco_pb2 as pb

ROOT = Path(__file__).parents[2]
FOLDER = Path("diloco_jax/transport/proto")


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts/gen_proto", tmp_path], check=True, timeout=60, env={**os.environ, "PYTHON": sys.executable}
    )
    for name in ("diloco_pb2.py", "diloco_pb2.pyi"):
        assert (tmp_path / FOLDER / name).read_text() == (ROOT / FOLDER / name).read_text(), (
            f"{name} is not what diloco.proto gives: run scripts/gen_proto"
        )


@pytest.mark.parametrize("kind", wire._FIELDS, ids=lambda kind: kind.__name__)
def test_proto_has_every_field_of_every_message(kind: type) -> None:
    names = {field.name for field in getattr(pb, kind.__name__).DESCRIPTOR.fields}
    expected = {column for _, _, columns in wire._FIELDS[kind] for column in columns}
    assert names == expected, f"{kind.__name__}: diloco.proto and the class differ"
