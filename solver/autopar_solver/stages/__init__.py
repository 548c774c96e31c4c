"""Cuts a chain of layers into pipeline stages: the inter-operator problem."""
