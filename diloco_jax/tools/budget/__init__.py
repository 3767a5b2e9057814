"""The memory, link rates and FLOPs that a config needs, computed in one place for all tools."""
