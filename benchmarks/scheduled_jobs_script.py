"""The training script of `scheduled_jobs.py`: that of `soak.py`, with set step times.

Usage: scheduled_jobs_script.py OUT STEPS WIDTH DEPTH SECONDS
All nodes share this machine's cores, so that more processes make no step faster. A step
takes `ray_pace.seconds_of` instead: a plan's seconds on as many devices as there are.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time

import soak_script as script
from ray_pace import seconds_of


def main() -> None:
    """Trains, and writes a line for every step."""
    one_s = float(sys.argv[5])
    run = script.started()
    with open(f"{script.OUT}.{os.getpid()}", "a") as file:
        for done in run:
            devices = math.prod(run.plan.axis_sizes)
            line = [done.step, float(done.result), time.time(), devices]
            print(json.dumps(line), file=file, flush=True)
            time.sleep(max(seconds_of(one_s, devices) - done.seconds, 0.0))


if __name__ == "__main__":
    main()
