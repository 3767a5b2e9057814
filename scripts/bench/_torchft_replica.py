"""One torchft replica group of one process that trains with DiLoCo, for the benches that compare with torchft.

It runs in the environment of torchft. Its only argument is a JSON object of settings. It writes a JSON line for each
event, with `t` in seconds of the system clock: imported, ready (before the first inner step), healed (another replica's
state was loaded), commit (a synchronisation has ended), done.
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

# A replica that has finished keeps its process for this time, because others may need it; the bench ends it.
REST_S = 3600


class Replica:
    """Model, optimizers and manager of one replica."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.emit("imported")
        host, timeout = settings["host"], timedelta(seconds=settings["timeout_s"])
        self._model = make_model(**settings["model"])
        self._inner = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=settings["replicas_min"],
            # DiLoCo refuses an asynchronous quorum.
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=settings["lighthouse"],
            replica_id=settings["name"],
            hostname=host,
        )

    def emit(self, event: str, **facts: object) -> None:
        with open(self._settings["events"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"t": time.time(), "event": event, **facts}) + "\n")

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "inner": self._inner.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._inner.load_state_dict(state["inner"])
        self.emit("healed")

    def _pieces(self) -> list[nn.Module]:
        """Cut the model into one or two fragments; two have about half of the parameters each."""
        layers = list(self._model)
        if self._settings["fragments"] == 2:
            return [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
        return [self._model]

    def train(self) -> None:
        """Make inner steps of at least step_s until `syncs` synchronisations have ended; forever if it is None."""
        settings, pieces = self._settings, self._pieces()
        outer = [torch.optim.SGD(p.parameters(), lr=0.7, momentum=0.9, nesterov=True) for p in pieces]
        tokens = torch.randint(0, settings["model"]["vocab_size"], (settings["batch_size"], settings["seq_len"] + 1))
        options = {"sync_every": settings["sync_every"], **settings["diloco"]}
        first_outer = outer if len(outer) > 1 else outer[0]
        with DiLoCo(self._manager, pieces, self._inner, first_outer, **options):
            self.emit("ready")
            began_s, seen = time.monotonic(), self._manager.current_step()
            while settings["syncs"] is None or seen < settings["syncs"]:
                time.sleep(max(0.0, began_s + settings["step_s"] - time.monotonic()))
                began_s = time.monotonic()
                self._inner.zero_grad()
                logits = self._model(tokens[:, :-1])
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                # torchft's hook makes every sync_every-th step a synchronisation.
                self._inner.step()
                if self._manager.current_step() != seen:
                    seen = self._manager.current_step()
                    self.emit("commit", step=seen, participants=self._manager.num_participants())
        self.emit("done")
        time.sleep(REST_S)


if __name__ == "__main__":
    # Replicas share the machine, as our islands do.
    torch.set_num_threads(1)
    words = json.loads(sys.argv[1])
    # torchft advertises the host's name, which must be the address that others reach.
    socket.gethostname = lambda: words["host"]  # type: ignore[assignment]
    Replica(words).train()
