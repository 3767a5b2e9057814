"""The needs of a config in memory, link rates and FLOPs, computed once for all tools."""
