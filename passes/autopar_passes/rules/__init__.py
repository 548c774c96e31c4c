"""What is known of single equations: sharding rules and FLOPs."""
