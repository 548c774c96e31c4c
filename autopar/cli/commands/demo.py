"""``autopar demo``: plans a GPT, trains it, and checks the predictions."""

from typing import Annotated

import typer

from autopar.cli import options


@options.planning("seconds")
def demo(
    devices: Annotated[int, typer.Option(min=1, help="CPU devices to simulate.")] = 8,
    steps: Annotated[int, typer.Option(min=2, help="Steps to train.")] = 40,
    *,
    asked: options.Asked,
) -> None:
    """Plans a GPT for simulated devices, trains it, and checks what was predicted."""
    # They import JAX, which help must not.
    from autopar.cli import common, demonstration

    common.simulate_devices(devices)
    with common.progress() as say:
        demonstration.run(
            devices=devices, steps=steps, options=asked, show=typer.echo, say=say
        )
