"""The two ends of a connection with the syncer over gRPC: what a learner dials, and what a listener answers."""
