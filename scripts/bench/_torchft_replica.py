"""One torchft replica with its DiLoCo, for vs_torchft. Runs in torchft's own environment, not in ours.

Writes one JSON line per event, `t` in seconds of the system's clock: imported, ready (model and manager stand, the
first inner step comes next), healed (another replica's state was loaded), commit.
"""

import json
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

TIMEOUT = timedelta(seconds=60)


class Replica:
    """Model, optimizers and manager of one replica group of one process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.emit("imported")
        self._model = make_model(**settings["model"])
        self._inner = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._outer = torch.optim.SGD(self._model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self._store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            use_async_quorum=False,  # DiLoCo refuses the other
            timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self._store.port,
            lighthouse_addr=settings["lighthouse"],
            replica_id=settings["name"],
            hostname="localhost",
        )

    def emit(self, event: str, **facts: object) -> None:
        line = json.dumps({"t": time.time(), "event": event, **facts})
        with open(self._settings["events"], "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "inner": self._inner.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._inner.load_state_dict(state["inner"])
        self.emit("healed")

    def train(self) -> None:
        """Inner steps for ever, none shorter than step_s."""
        settings = self._settings
        tokens = torch.randint(0, settings["model"]["vocab_size"], (settings["batch_size"], settings["seq_len"] + 1))
        with DiLoCo(self._manager, [self._model], self._inner, self._outer, sync_every=settings["sync_every"]):
            self.emit("ready")
            began_s, seen = time.monotonic(), self._manager.current_step()
            while True:
                time.sleep(max(0.0, began_s + settings["step_s"] - time.monotonic()))
                began_s = time.monotonic()
                self._inner.zero_grad()
                logits = self._model(tokens[:, :-1])
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                self._inner.step()  # every sync_every-th time torchft's hook makes a round of it
                if self._manager.current_step() != seen:
                    seen = self._manager.current_step()
                    self.emit("commit", step=seen, participants=self._manager.num_participants())


if __name__ == "__main__":
    torch.set_num_threads(1)  # three replicas share the machine, as our islands do
    Replica(json.loads(sys.argv[1])).train()
