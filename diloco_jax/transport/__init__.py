"""Connections between islands and the syncer, and among the hosts of one island."""

import os

# gRPC's core logs dozens of lines for one failed handshake.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
