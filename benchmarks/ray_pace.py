"""The pace of the trainings of `scheduled_jobs.py`."""

# What a step on n devices takes is that on one, over n to this power.
SCALING = 0.85


def seconds_of(one_s: float, devices: int) -> float:
    """Seconds of a step, from those on one device."""
    return one_s / devices**SCALING
