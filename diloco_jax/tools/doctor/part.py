"""One process's part in a run: its needs, and the settings on which all must agree."""

from collections.abc import Mapping
from typing import NamedTuple

from diloco_jax.runtime.model.evaluation import Scorer
from diloco_jax.runtime.model.global_model import make_setup
from diloco_jax.settings.cutting import settle
from diloco_jax.settings.fingerprint import fingerprint
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.budget.links import LinkNeeds
from diloco_jax.tools.budget.memory import num_parameters
from diloco_jax.tools.budget.needs import IslandKind, outline, syncer_needs
from diloco_jax.training.data.corpus import load_source


class ProcessPart(NamedTuple):
    """One process's part in a run."""

    parameters: int  # of the model
    settings: Mapping[str, str]  # what both sides must agree on, by name
    links: LinkNeeds  # what one learner moves
    memory_bytes: float  # of this process on its host, estimated
    disk_bytes: int  # of the run's folder on this host; 0 without snapshots


def part_of(config: RunConfig, island: str = "") -> ProcessPart:
    """Work out the part of an island's process, or of the syncer's where no island is named.

    Raises:
        ValueError: the model, or code of the user's own, cannot be loaded.
    """
    found = outline(config, IslandKind(config.island(island), (island,)))
    settings = dict(fingerprint(settle(config, found.plan), found.plan.fingerprint, _corpus(config)))
    if not island:  # code of the user's own that is the syncer's alone
        make_setup(config, found.plan)
        Scorer(config.evaluation)
    own = (found.needs.host, found.needs.disk_bytes) if island else syncer_needs(config, found.plan)
    return ProcessPart(num_parameters(found.blueprint), settings, found.links, sum(own[0]), own[1])


def _corpus(config: RunConfig) -> str:
    """Name the corpus that this machine would read; "" if it cannot, which is a check of its own."""
    try:
        return load_source(config.data, config.train.seq_len).corpus
    except (ValueError, OSError):
        return ""
