"""The training script of `ray_elastic.py`: that of `soak.py`, with a set pace.

Usage: autopar run --backend ray benchmarks/ray_script.py OUT STEPS
The file `pace` beside OUT holds the seconds to wait after each step.
"""

from __future__ import annotations

import json
import os
import pathlib
import time

import soak_script as script


def main() -> None:
    """Trains, and writes a line for every step."""
    pace = pathlib.Path(script.OUT).with_name("pace")
    run = script.started()
    with open(f"{script.OUT}.{os.getpid()}", "a") as file:
        for done in run:
            line = [done.step, float(done.result), time.time()]
            print(json.dumps(line), file=file, flush=True)
            time.sleep(float(pace.read_text()))


if __name__ == "__main__":
    main()
