"""Links between islands and the syncer."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gRPC's core logs dozens of lines for one failed handshake
