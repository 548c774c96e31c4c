"""Changes the rate of links between hosts while a script trains.

    python benchmarks/network/link_change.py [--rates 1000 50] [--codec auto]

A run over four hosts, which are network namespaces, trains `link_script.py` at the
first rate, in Mbit/s. Then all links change to the second rate, and later back to the
first rate. The run is not told. A row has the seconds until the run noticed the change
and trained under another plan. It also has the ratio of its step time to that of a run
that began with links of this rate.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from bed import Bed
from host_run import HostRun

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOSTS = 4


def start(folder: pathlib.Path, bed: Bed, given: Any, rate: float) -> HostRun:
    """Starts a run that plans for links of a rate."""
    bed.set_rate(rate)
    cluster = f"1x1:cpu,network={rate:g}Mb/s"
    return HostRun(folder, bed, [cluster, given.codec, str(given.layers), "32x64"])


def cold(folder: pathlib.Path, bed: Bed, given: Any, rate: float) -> dict[str, Any]:
    """The step of a run that begins with links of a rate."""
    run = start(folder, bed, given, rate)
    try:
        if run.wait_for("formed", 1) is None:
            raise SystemExit(run.output())
        return {"step_s": run.step_s(given.seconds), "plan": run.scheme()}
    finally:
        run.close()


def measure(given: Any) -> list[dict[str, Any]]:
    """A row for each change of the rate."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary, Bed(HOSTS + 1) as bed:
        place = pathlib.Path(temporary)
        first, second = given.rates
        begun = {
            rate: cold(place / f"cold{rate:g}", bed, given, rate)
            for rate in (first, second)
        }
        run = start(place / "run", bed, given, first)
        try:
            run.wait_for("formed", 1)
            run.step_s(given.seconds)
            for k, (old, new) in enumerate([(first, second), (second, first)]):
                bed.set_rate(new)
                at = time.time()
                formed = run.wait_for("formed", k + 2)
                step_s = run.step_s(given.seconds)
                rows.append(
                    {
                        "from Mbit/s": old,
                        "to Mbit/s": new,
                        "seconds until replanned": formed and round(formed - at, 1),
                        "prepared while training": run.prepared(),
                        "pause": run.pause(),
                        "load": round(os.getloadavg()[0], 1),
                        "step ms": round(1e3 * step_s, 1),
                        "cold start's step ms": round(1e3 * begun[new]["step_s"], 1),
                        "over cold start's": round(step_s / begun[new]["step_s"], 3),
                        "plan": run.scheme(),
                        "cold start's plan": begun[new]["plan"],
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
        finally:
            print(run.output()[-3000:], file=sys.stderr)
            run.close()
    return rows


def main() -> None:
    """Measures, and writes the data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs=2, default=[1000.0, 50.0])
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each median")
    data = ROOT / "docs" / "data" / "link_change.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    given = parser.parse_args()
    rows = measure(given)
    words = ["python benchmarks/network/link_change.py", *sys.argv[1:]]
    made = {"command": " ".join(words), "rows": rows}
    given.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
