"""The simulated step times of the trainings of `scheduled_jobs.py`."""

# Seconds of a step on n devices are those on one device, divided by n to this power.
SCALING = 0.85


def seconds_of(one_s: float, devices: int) -> float:
    """Seconds of a step, from the seconds on one device."""
    return one_s / devices**SCALING
