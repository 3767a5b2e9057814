"""The protocol machines of a real run on virtual time. Standard library only."""
