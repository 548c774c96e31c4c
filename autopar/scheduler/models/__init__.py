"""Models of the seconds of a step on given nodes, devices and batches."""
