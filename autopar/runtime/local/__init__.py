"""Training by local steps: replicas that synchronise once in several steps."""
