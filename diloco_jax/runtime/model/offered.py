"""A model that the first island sends: its limits, and its place in the run's folder.

The values are float32, little-endian, tensor after tensor in the order of its description (layout_text.py). The run's
folder keeps the initial values, so that a restarted syncer has them before it reads its tape.
"""

import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from diloco_jax.core.passes import prepare
from diloco_jax.runtime.model.layout_text import read_layout
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import ADDRESS_FILE, OFFERED
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump_chosen
from diloco_jax.transport.endpoints.greeting import ModelDesk
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.session.description import Description

POLL_S = 0.5

log = logging.getLogger(__name__)


class OfferedModel:
    """The model that a user's loop sent, stored as a checkpoint; ValueError if it is damaged.

    Args:
        kept: Folder of the checkpoint.
        desk: The listener that took the model. It tells islands that the run starts, until `close_desk`.

    Attributes:
        arrived_s: When this process had the model, on the monotonic clock.
    """

    # The first learner describes the islands' data.
    corpus = ""

    def __init__(self, kept: Path, desk: ModelDesk | None = None) -> None:
        self._kept = checkpoint.CheckpointReader(kept)
        self._desk = desk
        self.arrived_s = time.monotonic()
        self.shapes, self.kinds = read_layout(str(self._kept.meta["layout"]))

    def close_desk(self) -> None:
        """Free the port for the syncer's own listener; safe to call again."""
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.close()

    def initial_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Read the initial values: (path, new float32 array) by ascending path; ValueError if they are damaged."""
        return ((path, self._kept.array(checkpoint.PARAMETERS, path)) for path in self.shapes)


def describe_run(config: RunConfig, layout: str) -> Description:
    """Return the description of a run for users' loops, without files and address, which belong to the loop's machine.

    It has only settings that differ from the default, because a loop of an earlier release refuses unknown ones.
    """
    here = TransportConfig()
    local = {name: getattr(here, name) for name in ("address", "tls_ca", "tls_certificate", "tls_key", "token_file")}
    # A standby needs a bucket as address, and only the syncer's machine knows of it.
    told = replace(config, transport=replace(config.transport, **local), syncer=replace(config.syncer, standby=False))
    return Description(dump_chosen(told), layout)


def offered_model(config: RunConfig, run_dir: Path, stop: threading.Event) -> OfferedModel | None:
    """Return the model of this run from its folder, else wait for the first island that sends one.

    This process listens on the address that the syncer uses afterwards. The listener stays open until the caller closes
    it (`OfferedModel.close_desk`), because an island that finds nobody for `transport.connect_timeout_s` ends.

    Returns:
        None once `stop` is set.

    Raises:
        ValueError: The folder's model is damaged, or this machine cannot listen.
    """
    folder = run_dir / OFFERED
    for found in checkpoint.complete(folder):
        return OfferedModel(found)
    desk = ModelDesk(config.transport, describe_run(config, ""), lambda layout: _bytes_of(layout, config))
    pulse = Pulse(config.watchdog, "the wait for a model", (run_dir, "syncer"))
    try:
        (run_dir / ADDRESS_FILE).write_text(desk.address, encoding="utf-8")
        log.info(f"waiting at {desk.address} for the first island, which sends the model")
        # Islands import and compile for as long, so nobody waits for this later. A model that has arrived does.
        pulse.phase("compiling the merge while the first island sends the model")
        prepare(stop.is_set)
        pulse.phase("waiting for the first island, which sends the model")
        # Islands may take any time to start; probes see that this process waits.
        pulse.rest()
        while (offer := desk.take(POLL_S)) is None:
            if stop.is_set():
                desk.close()
                return None
        size = f"{len(offer.values) / 1e6:.1f} MB"
        pulse.phase(f"loading the model that {offer.learner_id} sent ({size}); islands wait for it")
        shapes, _ = read_layout(offer.layout)
        flat, values, start = np.frombuffer(offer.values, "<f4"), {}, 0
        for path, shape in shapes.items():
            values[path] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
        about = {"global_step": 0, "layout": offer.layout}
        model = OfferedModel(checkpoint.save(folder, {checkpoint.PARAMETERS: values}, about), desk)
        model.arrived_s = offer.arrived_s
    except BaseException:
        desk.close()
        raise
    finally:
        pulse.close()
    return model


def _bytes_of(layout: str, config: RunConfig) -> int:
    """Return the size of a model's values in bytes; ValueError for a model that this run cannot take."""
    shapes, kinds = read_layout(layout)
    count, limit = sum(math.prod(shape) for shape in shapes.values()), config.syncer.parameters_max
    if count > limit:
        raise ValueError(f"the model has {count:,} parameters, the limit is {limit:,}: raise syncer.parameters_max")
    resolve(config, shapes, kinds)
    return 4 * count
