"""Cases in which a planned step is faster than the usual plans, or only as fast.

    python benchmarks/when.py [--out docs/data/when.json] [--only NAME ...]
    python benchmarks/when.py --table          # the file as the tables of docs/when.md

Each case of `CASES` is one call of `autopar compare --json`: our plan and the best mesh
of each usual plan. Cases with described clusters are predicted; those with ``measure``
run on 8 simulated devices. `by_hand` times the planned step and `jax.jit` with a batch
that is split by hand, on the same devices in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import workloads
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "data" / "when.json"
DEVICES = 8
ROUNDS = 15
GPT_1B = (
    "scan=true layers=24 d_model=2048 heads=16 seq=2048 vocab=50304 dtype=bfloat16"
    " attention=cudnn"
)
DATA, SHARDED = ("data parallel",), ("ZeRO-1", "FSDP (ZeRO-3)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of ``autopar compare``."""

    name: str
    what: str  # description in the table
    kind: str  # part of the page that shows the case
    example: str
    cluster: str
    options: str = ""

    def command(self) -> list[str]:
        """The arguments after ``autopar``."""
        words = f"compare examples/{self.example} --cluster {self.cluster}"
        return [*words.split(), *self.options.split(), "--json"]


def case(name: str, kind: str, what: str, example: str, *rest: str) -> Case:
    """A case of an example with its options, such as ``gpt layers=2``."""
    module, _, options = example.partition(" ")
    cluster, *others = rest
    return Case(
        name=name,
        kind=kind,
        what=what,
        example=f"{module}.py:workload {options}".strip(),
        cluster=cluster,
        options=" ".join(others),
    )


CASES = (
    case(
        "small-fast",
        "one fast host",
        "GPT of 0.8 M parameters, 8 H100",
        "gpt layers=4",
        "8:h100",
    ),
    case(
        "resnet-fast",
        "one fast host",
        "ResNet, 224 x 224, batch 512, 8 A100",
        "resnet width=64 size=224 batch=512 classes=1000 dtype=bfloat16",
        "8:a100",
    ),
    case(
        "gpt-fast",
        "one fast host",
        "GPT of 1.3 B, batch 64, 8 H100",
        f"gpt {GPT_1B} batch=64 remat=true",
        "8:h100",
    ),
    case(
        "memory",
        "little memory",
        "GPT of 1.3 B, batch 64, 8 A100, 16 GB of each",
        f"gpt {GPT_1B} batch=64 remat=true",
        "8:a100",
        "--memory 16GB",
    ),
    case(
        "memory-less",
        "little memory",
        "the same with 6 GB, in 4 microbatches",
        f"gpt {GPT_1B} batch=64 remat=true",
        "8:a100",
        "--memory 6GB --microbatches 4",
    ),
    case(
        "hosts",
        "several hosts",
        "GPT of 1.3 B, batch 256, 8 x 8 A100, 25 Gb/s between hosts",
        f"gpt {GPT_1B} batch=256 remat=true",
        "8x8:a100,network=25Gb/s",
    ),
    case(
        "hosts-fast",
        "several hosts",
        "the same, 400 Gb/s between hosts",
        f"gpt {GPT_1B} batch=256 remat=true",
        "8x8:a100,network=400Gb/s",
    ),
    case(
        "hosts-slow",
        "slow links",
        "GPT of 1.3 B, batch 256, 8 x 8 A100, 10 Gb/s, with codecs",
        f"gpt {GPT_1B} batch=256 remat=true",
        "8x8:a100,network=10Gb/s",
        "--compression auto",
    ),
    case(
        "links-slow",
        "slow links",
        "GPT of 3 M, batch 64, 4 hosts of 2 CPUs, 100 Mb/s, with codecs",
        "gpt layers=4 d_model=256 batch=64",
        "4x2:cpu,network=100Mb/s",
        "--compression auto",
    ),
    case(
        "moe",
        "other models",
        "mixture of 32 experts, 4 x 8 H100",
        "moe layers=4 d_model=1024 heads=16 experts=32 ffn=4096 seq=1024 batch=64"
        " vocab=32000 dtype=bfloat16",
        "4x8:h100",
    ),
    case(
        "recommendation",
        "other models",
        "tables of 8 x 4 M rows, batch 8192, 2 x 8 A100",
        "recommendation rows=4194304 width=64 batch=8192 hidden=1024",
        "2x8:a100",
    ),
    case(
        "lstm",
        "other models",
        "LSTM of width 1024, 32 k words, 2 x 4 A100",
        "lstm d_model=1024 vocab=32000 batch=64",
        "2x4:a100",
    ),
    case(
        "run-gpt",
        "run on 8 simulated devices",
        "GPT of 0.8 M",
        "gpt batch=32",
        "8:cpu",
        "--measure",
    ),
)


def compared(case: Case) -> dict[str, Any]:
    """The rows of one comparison."""
    print(f"{case.name}: autopar {' '.join(case.command())}", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", "autopar", *case.command()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)["plans"]
    return {
        "name": case.name,
        "kind": case.kind,
        "what": case.what,
        "command": " ".join(["autopar", *case.command()]),
        "plans": rows,
    }


def by_hand(rounds: int = ROUNDS) -> dict[str, Any]:
    """Step times of a small GPT: planned, planned as data parallel, and split by hand.

    The second and the third step have the same layouts, so their difference is the time
    that autopar adds to a step. The first calls, and the CPU seconds that each takes,
    compile the programs anew.
    """
    jax.config.update("jax_num_cpu_devices", DEVICES)
    run = workloads.training("gpt", batch=32)
    batch = next(run.batches())
    mesh = jax.make_mesh(
        (DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    cluster = f"{DEVICES}:cpu"
    planned = autopar.parallelize(run.step, cluster=cluster)
    pins = {"state/*": P(), "batch/*": P("data")}
    split = autopar.parallelize(run.step, cluster=cluster, max_axes=1, pins=pins)
    plain = jax.jit(run.step, donate_argnums=0)
    states = {
        name: step.init(run.create_state, jax.random.key(0), batch=run.batch)
        for name, step in (("autopar", planned), ("autopar, batch split", split))
    } | {
        "by hand": jax.device_put(run.create_state(jax.random.key(0)), whole),
    }
    steps = {"autopar": planned, "autopar, batch split": split, "by hand": plain}
    batches = dict.fromkeys(steps, batch) | {"by hand": jax.device_put(batch, rows)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    first: dict[str, float] = {}
    losses: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name in sorted(steps, reverse=turn % 2 == 1):
            start, cpu = time.perf_counter(), time.process_time()
            states[name], loss = steps[name](states[name], batches[name])
            losses[name] = float(jax.block_until_ready(loss))
            if turn == 0:
                first[name] = time.process_time() - cpu
            else:
                seconds[name].append(time.perf_counter() - start)
    assert planned.plan is not None
    return {
        "step_s": {name: statistics.median(s) for name, s in seconds.items()},
        "first_call_cpu_s": first,
        "loss": losses,
        "scheme": planned.plan.worth.scheme,
        "rounds": rounds,
    }


def best(rows: Iterable[dict[str, Any]], names: Sequence[str], key: str) -> float:
    """The least value of a quantity, over plans of these names that fit; infinite if
    none fits.
    """
    return min(
        (r[key] for r in rows if r["name"] in names and r["fits"] and key in r),
        default=float("inf"),
    )


def table(found: dict[str, Any]) -> str:
    """The measured tables of docs/when.md."""
    lines = []
    for kind in dict.fromkeys(c["kind"] for c in found["cases"]):
        measured = any(
            "measured_s" in r
            for c in found["cases"]
            if c["kind"] == kind
            for r in c["plans"]
        )
        key = "measured_s" if measured else "step_s"
        lines += [
            f"| {kind} | autopar | data parallel | ZeRO or FSDP | best usual plan |",
            "| --- | --- | --- | --- | --- |",
        ]
        for one in found["cases"]:
            if one["kind"] == kind:
                lines.append(_row(one, key))
        lines.append("")
    return "\n".join(lines)


def _row(one: dict[str, Any], key: str) -> str:
    ours, *others = one["plans"]
    names = [row["name"] for row in others]
    cells = [best(others, group, key) for group in (DATA, SHARDED, names)]
    told = (_against(cell, ours[key]) for cell in cells)
    return f"| {one['what']} | {_time(ours[key])} | {' | '.join(told)} |"


def _against(seconds: float, ours: float) -> str:
    if seconds == float("inf"):
        return "does not fit"
    return f"{seconds / ours:.2f} x"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def write(out: pathlib.Path, found: dict[str, Any]) -> None:
    """Writes the figures that are measured so far."""
    found |= {"jax": jax.__version__, "cores": os.cpu_count()}
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and writes the file; or prints the file's tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    parser.add_argument("--only", nargs="*", help="measure these cases anew")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    if options.out.exists():
        found = json.loads(options.out.read_text())
    if options.table:
        print(table(found))
        return
    kept = {one["name"]: one for one in found.get("cases", [])}
    for one in CASES:
        if options.only is None or one.name in options.only:
            kept[one.name] = compared(one)
            found["cases"] = [kept[c.name] for c in CASES if c.name in kept]
            write(options.out, found)
    if options.only is None or "by-hand" in options.only:
        found["by_hand"] = by_hand()
        write(options.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
