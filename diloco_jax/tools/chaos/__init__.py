"""A real run under faults, and the verdict on how it took them."""
