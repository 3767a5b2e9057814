"""The model that an island brings: who answers islands between its arrival and the syncer's own listener."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diloco_jax.core.kinds import Kind
from diloco_jax.runtime.model.layout_text import layout_of
from diloco_jax.runtime.model.offered import OfferedModel, describe_run, offered_model
from diloco_jax.runtime.records.files import ADDRESS_FILE
from diloco_jax.settings.run import RunConfig, SyncerConfig
from diloco_jax.settings.text import parse_text
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.transport.endpoints.greeting import ask_description, offer_model
from diloco_jax.transport.link import TransportConfig, TransportError
from tests.limits import HANGS_S
from tests.runtime.helpers import wait_for


@pytest.mark.net
def test_islands_are_answered_until_the_syncer_opens_its_own_listener(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = replace(RunConfig(), model=ModelConfig(module="own"), transport=TransportConfig(address="127.0.0.1:0"))
    found: list[OfferedModel | None] = []
    waiting = threading.Thread(target=lambda: found.append(offered_model(config, tmp_path, threading.Event())))
    waiting.start()
    address = wait_for(lambda: (tmp_path / ADDRESS_FILE).exists() and (tmp_path / ADDRESS_FILE).read_text(), "a desk")
    there = TransportConfig(address=str(address), connect_timeout_s=5.0)
    values = np.arange(48, dtype="<f4")
    layout = layout_of({"w": (48,)}, {"w": Kind("vector")})
    assert offer_model(there, "a", layout, [values.view(np.uint8).data]) == ""
    waiting.join(HANGS_S)
    (model,) = found
    assert model is not None and dict(model.initial_parameters())["w"].tolist() == values.tolist()
    # The syncer cuts the model and opens its folder now, which may take minutes.
    assert ask_description(there, "b").coming
    said = [record.getMessage() for record in caplog.records]
    assert "a sends the run's model, 0.0 MB" in said and any("model of a has arrived in" in line for line in said)
    assert "loading the model that a sent (0.0 MB); islands wait for it" in said
    model.close_desk()
    model.close_desk()
    with pytest.raises(TransportError):
        ask_description(replace(there, connect_timeout_s=0.2), "b")


def test_loops_are_told_the_config_of_a_syncer_with_a_standby() -> None:
    """A standby is refused without a bucket as address, and loops are told no address."""
    bucket = TransportConfig(address="memory://run", poll_s=0.5)
    config = RunConfig(name="kept", transport=bucket, syncer=SyncerConfig(standby=True, merge_threads=3))
    told = parse_text(describe_run(config, "").config, "the syncer")
    assert (told.transport.address, told.syncer.standby) == (TransportConfig().address, False)
    assert (told.name, told.transport.poll_s, told.syncer.merge_threads) == ("kept", 0.5, 3)
