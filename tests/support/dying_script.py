"""`elastic_script.py`; the first process of a world may be killed as it forms.

Where the folder of the run has a file "die", the process removes it, connects to the
coordination service, and is gone before it has said anything.
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
    """A client that is the end of the first process."""
    client = plain_client(address, index, connect_s)
    order = pathlib.Path(os.environ[FOLDER_VARIABLE]) / "die"
    if index == 0 and order.exists():
        order.unlink()
        client.connect()
        time.sleep(0.3)  # until the others wait for what this one would say
        os.kill(os.getpid(), signal.SIGKILL)
    return client


if __name__ == "__main__":
    jax_processes.coordination_client = coordination_client
    script = pathlib.Path(__file__).with_name("elastic_script.py")
    runpy.run_path(str(script), run_name="__main__")
