"""The noise of gradients, measured while a planned step runs."""
