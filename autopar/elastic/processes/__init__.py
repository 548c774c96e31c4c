"""A run of several processes, which may leave and join while the run trains."""
