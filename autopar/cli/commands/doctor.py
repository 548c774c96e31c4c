"""``autopar doctor``: what is wrong with this machine's set-up."""

from autopar.cli import options
from autopar.cli.output import Result


def doctor(devices: options.Devices = None, as_json: options.Json = False) -> Result:
    """Looks at versions, devices, threads, names and caches of this machine.

    Each finding says what to do. The exit code is 1 where something is wrong.
    """
    # They import JAX, which help must not.
    from autopar.cli import common, examining

    if devices is not None:
        common.simulate_devices(devices)
    return examining.doctor(as_json)
