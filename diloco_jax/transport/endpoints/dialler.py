"""The names that a learner keeps between two sessions with its syncer, and payloads that a lost link cut."""

from functools import partial

from diloco_jax.protocol.messages import HostBlocks
from diloco_jax.transport.endpoints.ends import AnyLink, connect
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.partials import Partials
from diloco_jax.transport.store.store import Requests


class Dialler:
    """Connector of a learner to its syncer; it keeps the incomplete payloads of sessions that were cut.

    Args:
        host: Number of this host in its island; host 0 leads.
        hosts: Number of the island's hosts. With more than one, the payload of every FragmentValue that is sent is
            this host's bytes of it (core/host_bytes.py), empty if the host has no value to send.
        statement: The blocks of the fragments that this host holds, sent first on every link (runtime/model/cuts.py);
            b"" if it is the only host.
    """

    def __init__(
        self,
        config: TransportConfig,
        *,
        run_id: str,
        learner_id: str,
        incarnation: int,
        host: int = 0,
        hosts: int = 1,
        statement: bytes = b"",
    ) -> None:
        self._blocks = HostBlocks(learner_id, incarnation), statement
        names = {"run_id": run_id, "learner_id": learner_id, "incarnation": incarnation, "host": host, "hosts": hosts}
        self._requests = Requests()
        kept = {"partials": Partials(config.payload_bytes_max, config.resume_s), "requests": self._requests}
        self._dial = partial(connect, config, **kept, **names)  # type: ignore[arg-type]

    @property
    def requests(self) -> dict[str, int]:
        """Return the requests of all links so far to a bucket, and their bytes, by name; {} if none was made."""
        counts = self._requests.as_dict()
        return counts if any(counts.values()) else {}

    def connect(self, epoch: int, number: int = 0, run: str = "") -> AnyLink:
        """Open a link of a learner, or of one host of an island of several, by `grpc_link.connect`.

        A host that is not the leader sends values with its own bytes, and receives its blocks of every version. Its
        session ends together with the leader's. Close it after the leader's, or messages that the leader has not sent
        yet are lost.

        Args:
            epoch: Newest epoch of the syncer that we know; the leader's, for a host that is not the leader.
            number: Number of the leader's link, for a host that is not the leader.
            run: Id of the run that the learner has joined; "" if it has joined none.
        """
        link = self._dial(epoch=epoch, number=number, run=run)
        if self._blocks[1]:
            link.send(*self._blocks)
        return link
