"""Tokenizing on a Ray cluster: tasks encode the parts of a store, and this process writes their files.

Only this process needs the folder of the store; it sends the tokenizer to the tasks. The tasks read the source, so all
nodes must see it, as a URL or in a folder that they mount.
"""

import io
import itertools
import os
import socket
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import tokenizers

from diloco_jax.protocol.releases import RELEASE
from diloco_jax.training.data.documents import SourcePiece, needs
from diloco_jax.training.data.tokenizer import BYTES, open_tokenizer, tokenizer_files, write_tokenizer
from diloco_jax.training.data.tokenizing import EncodedPart, Engine, StorePart, encode_part, write_part

# How often Ray repeats a task if its worker or its node is lost.
RETRIES_MAX = 3
# The longest wait for a connection to the cluster.
REACH_S = 10.0
# The option of `diloco tokenize`, and what helps if nothing listens there.
ADDRESS, LEAVE_OUT = "--address", "leave --address out"
# Parts per core that a task encodes, or that wait in the cluster's memory to be written.
PARTS_PER_CORE = 2


def on_ray(address: str, workers: int) -> Engine:
    """Return an engine of `build_store` that runs on a Ray cluster.

    Args:
        address: HOST:PORT of the cluster, or `auto` for the cluster of this machine; "" starts a cluster here.
        workers: the most tasks at a time; 0 for one on each core of the cluster.

    Raises:
        ValueError: Ray is missing. The engine itself raises it if the cluster cannot be reached, if a task fails, or if
            workers are lost again and again.
    """
    # Ray reads this variable when it is imported. Without it, Ray forever repeats a task whose node has no memory left.
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES_MAX))
    ray = import_ray()

    def engine(parts: Sequence[StorePart]) -> Generator[int, None, None]:
        if not parts:
            return
        with _connected(ray, address, workers) as cores:
            # A cluster that this process did not start has more cores than --workers, so the number of parts limits
            # the tasks there.
            yield from _make(ray, parts, workers if address and workers else PARTS_PER_CORE * cores)

    return engine


def import_ray() -> Any:
    """Return the module of Ray; ValueError with the extra to install if it is missing."""
    # Ray reads this variable when it is imported. Without it, Ray sends statistics to a server that the network may
    # block.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return needs("ray", "ray")


@contextmanager
def _connected(ray: Any, address: str, workers: int) -> Iterator[int]:
    """Yield the number of cores of the cluster; at the end stop it, or only disconnect if it ran before."""
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    # Each task has one core.
    how["runtime_env"] = {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}}
    if ":" in address:
        check_reachable(address, ADDRESS, LEAVE_OUT)
    if not address:
        how |= {"num_cpus": workers or len(os.sched_getaffinity(0)), "include_dashboard": False}
    try:
        ray.init(address=address or "local", **how)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise no_cluster(address or "local", error, ADDRESS, LEAVE_OUT) from error
    try:
        cores = int(ray.cluster_resources().get("CPU", 0))
        if cores < 1:
            raise ValueError(
                f"the Ray cluster at {address} has no cores; add a node with ray start --address {address}"
            )
        yield cores
    finally:
        ray.shutdown()


def check_reachable(address: str, setting: str, remedy: str) -> None:
    """Refuse an address where nothing listens, because Ray would try it for minutes and write to the terminal.

    Args:
        address: HOST:PORT, or ray://HOST:PORT.
        setting: the option or setting that names the address, for the message.
        remedy: what helps beside a start of Ray, for the message.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), REACH_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise no_cluster(address, error, setting, remedy) from error


def no_cluster(address: str, error: Exception, setting: str, remedy: str) -> ValueError:
    """Return the error that there is no cluster at an address; the other arguments are those of `check_reachable`."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ValueError(
        f"there is no Ray cluster at {setting} {address} ({first}); start it with ray start --head, or {remedy}"
    )


def _make(ray: Any, parts: Sequence[StorePart], at_once: int) -> Iterator[int]:
    """Encode parts in tasks and write each as soon as it arrives; `at_once` limits the parts in memory."""
    files = ray.put(tokenizer_files(parts[0].tokenizer))
    task = ray.remote(max_retries=RETRIES_MAX, num_cpus=1)(_encoded)
    todo, running = iter(parts), dict[Any, StorePart]()
    while True:
        for part in itertools.islice(todo, at_once - len(running)):
            running[task.remote(part.pieces, files, _versions())] = part
        if not running:
            return
        for done in ray.wait(list(running))[0]:
            part = running.pop(done)
            tokens, encoded = _result(ray, done, part)

            def write(file: BinaryIO, tokens: bytes = tokens, encoded: EncodedPart = encoded) -> EncodedPart:
                file.write(tokens)
                return encoded

            yield write_part(part, write)


def _versions() -> str:
    """Return the versions that decide the ids of a text, together with the tokenizer's files."""
    return f"diloco-jax {RELEASE} with tokenizers {tokenizers.__version__}"


def _encoded(pieces: Sequence[SourcePiece], files: dict[str, str], wanted: str) -> tuple[bytes, EncodedPart]:
    """Encode a part on a worker; return its tokens, and the description of the part."""
    if (here := _versions()) != wanted:
        raise ValueError(f"a node of the Ray cluster has {here}, this process {wanted}; install the same on every node")
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), files)
        made = open_tokenizer(folder if files else BYTES)
    file = io.BytesIO()
    encoded = encode_part(pieces, made, file)
    return file.getvalue(), encoded


def _result(ray: Any, done: Any, part: StorePart) -> tuple[bytes, EncodedPart]:
    try:
        tokens, encoded = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, OSError):
            raise ValueError(
                f"a node of the Ray cluster cannot read {cause.filename or part.pieces[0].url} ({cause.strerror}); "
                "name a folder that all nodes mount, or a URL such as gs://bucket/folder"
            ) from error
        if isinstance(cause, ValueError):
            raise ValueError(str(cause)) from error
        raise ValueError(
            f"a task of the Ray cluster failed: {str(cause).strip().splitlines()[-1]}; install this version of "
            "diloco-jax with the extras data and ray on every node"
        ) from error
    except ray.exceptions.RayError as error:
        raise ValueError(
            f"the workers of part {part.number} were lost {RETRIES_MAX + 1} times ({type(error).__name__}), perhaps "
            "because memory ran out; run it again with fewer --workers"
        ) from error
    return tokens, EncodedPart(*encoded)
