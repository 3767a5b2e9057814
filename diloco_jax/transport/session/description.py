"""The description of a run, which a syncer gives to a loop of a user, or to a subscriber, before it joins."""

from typing import NamedTuple

from diloco_jax.transport.proto import diloco_pb2 as pb

DESCRIBE = "Describe"


class Description(NamedTuple):
    """A run, as its syncer describes it: its config as YAML, and the layout of its model, "" while it has none.

    `coming` is true while a learner sends the model.
    """

    config: str
    layout: str
    coming: bool = False
    # The number of the learner that asked, from 1; 0 if it asked for none, or the syncer gives none.
    number: int = 0
    # When the run started, in seconds since 1970. It distinguishes runs with the same name; 0 if unknown.
    began_unix_s: float = 0.0

    def reply(self) -> pb.DescribeReply:
        """Return the description as the answer to a call."""
        return pb.DescribeReply(
            config=self.config,
            layout=self.layout,
            coming=self.coming,
            number=self.number,
            began_unix_s=self.began_unix_s,
        )
