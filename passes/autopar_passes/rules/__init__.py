"""Facts about single equations: sharding rules and FLOPs."""
