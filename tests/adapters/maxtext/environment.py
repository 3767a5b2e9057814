"""The environment of MaxText, and a corpus for it, which the tests of this folder build once."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.limits import SLOW_HANGS_S
from tests.runtime.helpers import ROOT

PACKAGE = "maxtext[tpu]==0.2.5"
HOME = Path("~/.cache/diloco-trainers/maxtext-0.2.5-py312").expanduser()
# The island's environment on CPUs; the second keeps MaxText from the services of a cloud.
SURROUNDINGS = {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "PYTHONPATH": str(ROOT)}
# MaxText's arguments for a tiny model on the corpus: 2 layers, 64 wide.
TINY = {
    "hardware": "cpu",
    "base_emb_dim": "64",
    "base_num_query_heads": "4",
    "base_num_kv_heads": "4",
    "base_mlp_dim": "128",
    "base_num_decoder_layers": "2",
    "head_dim": "16",
    "vocab_size": "512",
    "max_target_length": "64",
    "per_device_batch_size": "4",
    "dtype": "float32",
    "weight_dtype": "float32",
    "attention": "dot_product",
    "dataset_type": "grain",
    "grain_file_type": "arrayrecord",
    "tokenizer_type": "huggingface",
    "grain_worker_count": "0",
    "grain_worker_count_eval": "0",
    "num_epoch": "100",
    "enable_tensorboard": "false",
    "log_config": "false",
    "learning_rate": "3e-3",
    "eval_interval": "1",
    "eval_steps": "4",
}


def python312() -> str:
    """Return a Python 3.12; skip the test if there is none."""
    for found in (
        shutil.which("python3.12"),
        *map(str, Path("~/.pyenv/versions").expanduser().glob("3.12*/bin/python")),
    ):
        # A shim of pyenv is there even if its version is not chosen.
        if found and not subprocess.run([found, "-c", "import venv"], capture_output=True).returncode:
            return found
    pytest.skip("MaxText needs Python 3.12, and there is none")


def clean_environment() -> dict[str, str]:
    """Return the environment without this suite's settings of Python and JAX."""
    left_out = ("PYTHON", "VIRTUAL_ENV", "JAX_", "XLA_", "NPROC", "DILOCO_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    # Compiled programs are shared with other tests of the same JAX.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return {**kept, **SURROUNDINGS, **({"JAX_COMPILATION_CACHE_DIR": cache} if cache else {})}


def maxtext_python() -> Path:
    """Return the interpreter of an environment with MaxText; skip the test if it cannot be built."""
    python, done = HOME / "bin" / "python", HOME / "built"
    needs = PACKAGE + (ROOT / "pyproject.toml").read_text()
    if done.exists() and done.read_text() == needs:
        return python
    HOME.parent.mkdir(parents=True, exist_ok=True)
    for command in (
        [python312(), "-m", "venv", "--clear", HOME],
        [python, "-m", "pip", "install", "-q", "uv"],
        [python, "-m", "uv", "pip", "install", "-q", "--python", python, PACKAGE, "-r", ROOT / "pyproject.toml"],
    ):
        words = [str(word) for word in command]
        ended = subprocess.run(words, capture_output=True, text=True, env=clean_environment(), timeout=SLOW_HANGS_S)
        if ended.returncode:
            pytest.skip(f"no environment for {PACKAGE}: {' '.join(ended.stderr.split())[-400:]}")
    done.write_text(needs)
    return python


def corpus(python: Path) -> Path:
    """Return a folder with records of the standard library and a tokenizer."""
    folder = HOME / "corpus"
    if not (folder / "done").exists():
        program = ROOT / "docs" / "examples" / "maxtext_corpus.py"
        subprocess.run([python, program, folder], check=True, env=clean_environment(), timeout=SLOW_HANGS_S)
        (folder / "done").touch()
    return folder


PARQUET = """
import sys
from pathlib import Path

import pyarrow
from pyarrow import parquet
sys.path.insert(0, sys.argv[1])
import maxtext_corpus

every = [record for text in maxtext_corpus.texts()[:400] for record in maxtext_corpus.records(text)]
for number in range(4):
    parquet.write_table(pyarrow.table({"text": every[number:4000:4]}), f"{sys.argv[2]}/train-{number}.parquet")
parquet.write_table(pyarrow.table({"text": every[4000:4400]}), f"{sys.argv[2]}/eval.parquet")
"""


def parquet_words(python: Path, data: Path, folder: Path, **more: str) -> list[str]:
    """Return MaxText's arguments for the tiny model on parquet files, with MaxText's default for worker processes."""
    made = [python, "-c", PARQUET, ROOT / "docs" / "examples", folder]
    subprocess.run(made, check=True, env=clean_environment(), timeout=SLOW_HANGS_S)
    files = {
        "dataset_type": "hf",
        "hf_path": "parquet",
        "hf_train_files": f"{folder}/train-*.parquet",
        "hf_eval_files": f"{folder}/eval.parquet",
        "hf_eval_split": "train",
    }
    left_out = ("grain_",)
    given = words(data, folder / "outputs", **files, **more)
    return [word for word in given if not word.startswith(left_out)]


def words(data: Path, outputs: Path, **more: str) -> list[str]:
    """Return MaxText's arguments for the tiny model."""
    files = {
        "grain_train_files": f"{data}/train.array_record",
        "grain_eval_files": f"{data}/eval.array_record",
        "tokenizer_path": f"{data}/tokenizer",
        "base_output_directory": str(outputs),
    }
    return ["base.yml", *(f"{key}={value}" for key, value in {**TINY, **files, **more}.items())]
