"""The arguments that MaxText gets: those of the user, and defaults that make it an island of this run.

MaxText takes a config file and `key=value` arguments. An argument of the user stays as it is, except that two of them
must differ between islands: `data_shuffle_seed` and `run_name`, the folder of MaxText's outputs.
"""

import os
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pydantic import ValidationError

# What an island reads: all data in a separate order, a separate shard of the data, what the syncer leases, or the same
# data in the same order as every other island.
Data = Literal["seed", "shard", "leased", "same"]
DATA: tuple[Data, ...] = get_args(Data)
# A seed of NumPy's and of grain's generators.
SEED_MAX = 2**31 - 1
OUTPUTS = "base_output_directory"
# Characters of a path that an error shows.
PATH_SHOWN = 200
# These modes of MaxText train in another way than an island does.
REFUSED = {
    "enable_diloco": "the syncer merges islands already",
    "elastic_enabled": "an island that loses a slice restarts and returns to the run",
    "enable_rampup_batch_size": "a merge weighs islands by a fixed number of tokens per step",
}
# Arguments that a choice of data needs, each with the reason. Leased data need one record for each sequence, in the
# process that has the leases.
NEEDED: Mapping[Data, Mapping[str, tuple[str, str]]] = {
    "shard": {"dataset_type": ("grain", "only grain's pipeline gets a shard")},
    "leased": {
        "packing": ("false", "a packed sequence has several records"),
        "use_truncation": ("true", "a record would become several sequences"),
        "grain_worker_count": ("0", "other processes have no leases"),
        "dataset_type": ("grain", "only grain's sources have positions"),
    },
}


class Arguments(NamedTuple):
    """Arguments of MaxText: its config file, "" for base.yml, and values by key."""

    config: str
    values: Mapping[str, str]

    def as_words(self) -> list[str]:
        """Return the arguments as words of MaxText's command line."""
        return [self.config, *(f"{key}={value}" for key, value in self.values.items())]


def read_arguments(words: Sequence[str], configs: Path) -> Arguments:
    """Read MaxText's arguments.

    Args:
        words: A config file and `key=value` words; without a file, base.yml. The folder of outputs becomes absolute.
        configs: MaxText's folder of configs. A file that does not exist, such as base.yml, is searched there.

    Raises:
        ValueError: A word is neither a config file nor `key=value`, or the file exists in neither place.
    """
    files = [word for word in words if "=" not in word]
    wrong = [word for word in files if not word.endswith((".yml", ".yaml"))]
    if wrong or len(files) > 1:
        raise ValueError(
            f"{(wrong or files[1:])[0]!r} is not an argument of MaxText; give one config file and key=value"
        )
    values = dict(word.split("=", 1) for word in words if "=" in word)
    for key, reason in REFUSED.items():
        if values.get(key, "false").lower() == "true":
            raise ValueError(f"{key}=true does not work on an island: {reason}; leave it out")
    # Orbax saves no checkpoint of MaxText below a relative path, and MaxText ends only at its second save.
    if (outputs := values.get(OUTPUTS)) and "://" not in outputs:
        # A shell does not expand ~ behind `key=`.
        values[OUTPUTS] = str(Path(os.path.expanduser(outputs)).absolute())
    return Arguments(_find_config(files[0] if files else "base.yml", configs), values)


def _find_config(file: str, configs: Path) -> str:
    found = next((path for path in (Path(file), configs / file) if os.path.isfile(path)), None)
    if found is None:
        raise ValueError(
            f"MaxText's config {file[:PATH_SHOWN]!r} exists neither here nor in {configs}; correct the path"
        )
    return str(found)


def with_defaults(arguments: Arguments, *, run: str, island: str, steps: int, hosts: int, data: Data) -> Arguments:
    """Return the arguments with the defaults of an island.

    Args:
        arguments: The user's arguments, which have precedence.
        run: Name of the run.
        island: Name of the island.
        steps: Global steps of the run, which MaxText's schedule of the learning rate gets.
        hosts: Processes of the island.
        data: What the island reads.

    Raises:
        ValueError: An argument does not fit to `data`.
    """
    values = dict(arguments.values)
    defaults = {"steps": str(steps), "learning_rate_schedule_steps": str(steps), "enable_checkpointing": "false"}
    # MaxText's own start of several processes on CPUs needs variables of its launcher.
    if hosts > 1 or values.get("hardware") == "cpu":
        defaults["skip_jax_distributed_system"] = "true"
    if data in NEEDED:
        _check_fits(data, values)
        # A file of the user may choose another pipeline, which would read the same data on all islands.
        defaults["dataset_type"] = "grain"
    if data == "leased":
        defaults |= {"packing": "false", "grain_worker_count": "0"}
    values = defaults | values
    values["run_name"] = f"{values.get('run_name') or run}-{island}"
    if data == "seed":
        values["data_shuffle_seed"] = str(island_seed(values.get("data_shuffle_seed", "0"), island))
    return Arguments(arguments.config, values)


def own_command(arguments: Arguments, folder: Path, *, evaluates: bool = False) -> str:
    """Return the command that starts MaxText itself, without an island, from an exported model.

    Args:
        arguments: The arguments of the export.
        folder: Folder of the exported model.
        evaluates: Whether MaxText shall only evaluate it: it evaluates after a step, which has a learning rate of 0.
    """
    # MaxText does not search its folder of configs, and does not accept a relative path of parameters.
    values = {"run_name": folder.name, **arguments.values, "load_parameters_path": str(folder.absolute() / "items")}
    if values.get("hardware") == "cpu":
        values.setdefault("skip_jax_distributed_system", "true")
    if evaluates:
        values |= {"learning_rate": "0", "steps": "1", "eval_interval": "1", "enable_checkpointing": "false"}
        values.setdefault("eval_steps", "20")
    return shlex.join(
        ["python", "-m", "maxtext.trainers.pre_train.train", *Arguments(arguments.config, values).as_words()]
    )


def island_seed(seed: str, island: str) -> int:
    """Return the seed of an island's order of the data, from the run's seed and the island's name.

    It is the same at each start of the island, because the saved position of its iterator belongs to this order.
    """
    return zlib.crc32(f"{seed}/{island}".encode()) & SEED_MAX


def _check_fits(data: Data, values: Mapping[str, str]) -> None:
    for key, (value, reason) in NEEDED[data].items():
        if (actual := values.get(key, value)).lower() != value:
            raise ValueError(f"{key}={actual} does not fit to --data {data}: {reason}; use {key}={value}")


@contextmanager
def refusal_named() -> Iterator[None]:
    """Turn MaxText's refusal of its arguments into one ValueError with all reasons: the island would fail again."""
    try:
        yield
    except ValidationError as error:
        if error.title != "MaxTextConfig":
            raise
        reasons = [" ".join([*map(str, each["loc"]), each["msg"]]) for each in error.errors(include_url=False)]
        raise ValueError(f"MaxText refuses its arguments: {'; '.join(reasons)}. Correct them") from None
