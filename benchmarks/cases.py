"""Runs a folder of small programs that failed in earlier releases, and judges each.

    python benchmarks/cases.py FOLDER [--only TEXT] [--json FILE]
    AUTOPAR_CASES=FOLDER python benchmarks/cases.py

Each program runs from a copy of the folder, in separate processes. For programs of
steps, `cases_probe.py` compares the step with `jax.jit`. For programs of runs, a judge
reads the output and the files that the run has left. The exit code is 2 without a
folder, and 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import cases_judges as judges
import feature_steps
import workloads

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE.parent / "docs" / "data" / "cases.json"
LIMIT_S = 2400.0
# The limits of the scripts are for an idle machine; they are multiplied by this factor.
SLOWER = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of the folder, its arguments, and the judge of its output."""

    path: str
    judge: Callable[[str, int], str]
    arguments: tuple[str, ...] = ()
    probe: str = ""

    @property
    def name(self) -> str:
        """The name of the program's file, with its arguments and its probe."""
        return " ".join((self.path, *self.arguments[-1:], self.probe)).strip()

    def command(self) -> list[str]:
        """The command to run in the program's folder."""
        file = pathlib.Path(self.path)
        if self.probe:
            return [sys.executable, str(HERE / "cases_probe.py"), self.probe, file.name]
        if file.suffix == ".sh":
            return ["bash", file.name]
        return [sys.executable, *(self.arguments or (file.name,))]


CASES = (
    Case("steps/explicit_mesh.py", judges.same_as_jit(1), probe="mesh"),
    Case("steps/ordered_effects.py", judges.same_as_jit(7), probe="plans"),
    Case("steps/ordered_effects.py", judges.same_as_jit(1), probe="effects"),
    Case("steps/multisteps_stages.py", judges.same_as_jit(6), probe="plans"),
    Case("steps/random_microbatches.py", judges.same_as_jit(6), probe="plans"),
    Case("steps/mixed_rows.py", judges.same_as_jit(6), probe="plans"),
    Case("steps/last_batches.py", judges.last_batches),
    Case("steps/pallas_microbatches.py", judges.same_as_jit(8), probe="plans"),
    Case(
        "steps/kernels_microbatches.py",
        judges.same_as_jit(6, judges.ffi_names_option),
        probe="plans",
    ),
    Case("steps/distill.py", judges.same_as_jit(4), probe="roles"),
    Case("steps/lora_scan.py", judges.same_as_jit(4), probe="roles"),
    Case(
        "steps/sparse.py", judges.same_as_jit(4, judges.rows_of_others), probe="roles"
    ),
    Case("steps/lstm_tm.py", judges.same_as_jit(4), probe="roles"),
    Case("steps/gnn_coupled.py", judges.graph),
    Case(
        "pricing/goodput_cudnn.py",
        judges.curve,
        (
            *("-m", "autopar", "goodput", "goodput_cudnn.py:workload"),
            *("--clusters", "8:h100", "impl=cudnn", "kernel=true"),
        ),
    ),
    Case("elastic/repro_restart_from_zero.sh", judges.lost_state),
    Case("elastic/pid_reuse.sh", judges.stranger_lives),
    Case("elastic/progs.sh", judges.damaged_programs),
    Case("elastic/flips.sh", judges.flipped_programs),
    Case("elastic/diskfull.sh", judges.full_disk),
    *(
        Case("elastic/huge_stop.py", judges.huge_cluster, ("huge_stop.py", cluster))
        for cluster in ("100000000:cpu", "1000000:cpu")
    ),
    Case("elastic/repro_file_deaf.py", judges.hears_on),
    Case("elastic/http_attack.py", judges.endpoint),
    Case(
        "files/torch_out_of_bounds.py",
        judges.same_as_jit(2, judges.out_of_bounds),
        probe="files",
    ),
    *(
        Case(
            "schedule/train_edges.py",
            judges.train_edge(ends, said),
            ("train_edges.py", name),
        )
        for name, ends, said in (
            ("codecbad", "->", "unknown codec 'int7'"),
            ("nan", "->", "steps 5 to 7 are not finite"),
            ("nanonce", "OK steps 30", r"step 5 is not finite \(1 in a row, 1 in all"),
            ("srcnone", "->", r"source\(320, 64\) returned None"),
        )
    ),
)


def patient(folder: pathlib.Path) -> pathlib.Path:
    """A folder with commands that give scripts more time, and that do not change nice
    values.
    """
    found = folder.parent / "bin"
    if not found.exists():
        found.mkdir()
        lines = {
            "timeout": f'exec {shutil.which("timeout")} $(({SLOWER} * $1)) "${{@:2}}"',
            "sleep": f'exec {shutil.which("sleep")} "$1" "$1" "$1"',
            "nice": 'exec "${@:3}"',
        }
        for name, line in lines.items():
            (found / name).write_text(f"#!/bin/bash\n{line}\n")
            (found / name).chmod(0o755)
    return found


def judged(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """Runs a case in a folder, and judges it."""
    begin = time.time()
    file = folder / case.path
    row: dict[str, Any] = {"case": case.name}
    environment = {
        "PYTHON": sys.executable,
        "AUTOPAR": str(HERE.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": feature_steps.FLAGS,
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{patient(folder)}:{os.environ['PATH']}",
    }
    try:
        judges.need(file.is_file(), f"{case.path} is absent")
        with subprocess.Popen(
            case.command(),
            cwd=file.parent,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as run:
            try:
                out, _ = run.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                raise judges.Wrong(f"still runs after {LIMIT_S:.0f} s") from None
        row["seen"] = " ".join(case.judge(out, run.returncode).split())
        row["right"] = True
    except judges.Wrong as error:
        row |= {"seen": str(error), "right": False}
    return row | {"seconds": round(time.time() - begin, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    given = os.environ.get("AUTOPAR_CASES")
    parser.add_argument("folder", nargs="?", default=given, help="of the cases")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--json", type=pathlib.Path, default=DATA, help="data file")
    asked = parser.parse_args(arguments)
    if asked.folder is None or not (pathlib.Path(asked.folder) / "steps").is_dir():
        print(
            f"cases.py: {asked.folder or 'no folder given'}: give the folder of cases "
            "as the argument, or as AUTOPAR_CASES.",
            file=sys.stderr,
        )
        return 2
    wrong, chosen = 0, [case for case in CASES if asked.only in case.name]
    with tempfile.TemporaryDirectory() as temporary:
        copy = pathlib.Path(temporary) / "cases"
        shutil.copytree(asked.folder, copy)
        for path in (copy, *copy.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        for case in chosen:
            row = judged(case, copy) | {"commit": workloads.commit()}
            wrong += not row["right"]
            write(asked.json, row)
            verdict = "right" if row["right"] else "WRONG"
            print(f"{verdict}  {row['case']}: {row['seen']}", flush=True)
    print(f"\n{len(chosen) - wrong} of {len(chosen)} right")
    return int(wrong > 0 or not chosen)


def write(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Writes the row of a case to the data file; the rows of other cases stay."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {x["case"]: x for x in (*rows, row)}
    rows = [known[case.name] for case in CASES if case.name in known]
    right = sum(x["right"] for x in rows)
    data = {
        "command": "python benchmarks/cases.py FOLDER",
        "summary": {"cases": len(rows), "right": right},
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
