"""One torchft replica that trains a number of steps with DiLoCo, for `wan vs_torchft`. Runs in torchft's environment.

Writes one JSON line per event, `t` in seconds of the system's clock: ready, commit (a synchronisation has ended), done.
"""

import json
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from _torch_model import make_model
from torch import nn
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

TIMEOUT = timedelta(seconds=300)


class Replica:
    """A replica group of one process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._model = make_model(**settings["model"])
        self._inner = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._store = torch.distributed.TCPStore(settings["host"], 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=settings["replicas"],
            use_async_quorum=False,  # DiLoCo refuses the other
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=settings["host"],
            store_port=self._store.port,
            lighthouse_addr=settings["lighthouse"],
            replica_id=settings["name"],
            hostname=settings["host"],
        )

    def emit(self, event: str, **facts: object) -> None:
        with open(self._settings["events"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"t": time.time(), "event": event, **facts}) + "\n")

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "inner": self._inner.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._inner.load_state_dict(state["inner"])

    def train(self) -> None:
        """So many synchronisations of inner steps, none shorter than step_s."""
        settings = self._settings
        layers = list(self._model)
        pieces: list[nn.Module] = [self._model]
        if settings["fragments"] == 2:  # about half of the parameters each
            pieces = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
        outer = [torch.optim.SGD(p.parameters(), lr=0.7, momentum=0.9, nesterov=True) for p in pieces]
        tokens = torch.randint(0, settings["model"]["vocab_size"], (settings["batch_size"], settings["seq_len"] + 1))
        schedule = {"sync_every": settings["sync_every"], "fragment_sync_delay": settings["delay"]}
        # one buffer for all tensors of a fragment: fewer round trips
        with DiLoCo(self._manager, pieces, self._inner, outer, use_bucketization=True, **schedule):
            self.emit("ready")
            seen = self._manager.current_step()
            while seen < settings["syncs"]:
                began_s = time.monotonic()
                self._inner.zero_grad()
                logits = self._model(tokens[:, :-1])
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                time.sleep(max(0.0, began_s + settings["step_s"] - time.monotonic()))
                self._inner.step()  # the last of sync_every makes a synchronisation of it
                if self._manager.current_step() != seen:
                    seen = self._manager.current_step()
                    self.emit("commit", step=seen, participants=self._manager.num_participants())
        self.emit("done")
        time.sleep(3600)  # others may still need this process; the bench ends it


if __name__ == "__main__":
    torch.set_num_threads(1)  # replicas share the machine, as our islands do
    words = json.loads(sys.argv[1])
    # torchft advertises the host's name, which every site resolves to itself
    socket.gethostname = lambda: words["host"]  # type: ignore[assignment]
    Replica(words).train()
