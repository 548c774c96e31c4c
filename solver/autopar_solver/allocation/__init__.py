"""Chooses the kind and number of devices for each job."""
