"""A run of several processes, which go and come while it trains."""
