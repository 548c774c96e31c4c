"""Runs `elastic_script.py`, but the first process of a world may die as it forms.

If the run's folder contains a file "die", the first process removes the file and
connects to the coordination service. Then it kills itself before it has sent anything.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import signal
import time
from typing import Any

from autopar.elastic.processes.link import FOLDER_VARIABLE
from autopar_passes import jax_processes

plain_client = jax_processes.coordination_client


def coordination_client(address: str, index: int, connect_s: int) -> Any:
    """Creates a client of the coordination service; the first process may die in it."""
    client = plain_client(address, index, connect_s)
    order = pathlib.Path(os.environ[FOLDER_VARIABLE]) / "die"
    if index == 0 and order.exists():
        order.unlink()
        client.connect()
        time.sleep(0.3)  # until the other processes wait for a message from this one
        os.kill(os.getpid(), signal.SIGKILL)
    return client


if __name__ == "__main__":
    jax_processes.coordination_client = coordination_client
    script = pathlib.Path(__file__).with_name("elastic_script.py")
    runpy.run_path(str(script), run_name="__main__")
