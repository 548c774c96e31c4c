"""Cluster traces that `fuzz.py` mutates, with their tables."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from fuzz_mutations import Format, zip_of, zip_parts

from autopar.errors import ScheduleError
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.simulator.engine import NodeEvent, Options, simulate
from autopar.scheduler.simulator.metrics import metrics
from autopar.scheduler.simulator.traces import spot
from autopar.scheduler.simulator.traces.recorded import read_trace

_NODE = {"ip": "m1", "gpus": ["gpu0", "gpu1"]}
_TIMES = ("2017-10-09 07:00:00", "2017-10-09 07:01:00", "2017-10-09 07:02:00.5 PDT")
_ATTEMPTS: list[dict[str, Any]] = [
    {"start_time": _TIMES[0], "end_time": _TIMES[1], "detail": [_NODE]},
    {"start_time": _TIMES[1], "end_time": _TIMES[2], "detail": [_NODE, _NODE]},
    {"start_time": _TIMES[1], "end_time": "None", "detail": []},
]
_PHILLY: list[dict[str, Any]] = [
    {"status": "Pass", "vc": "a", "jobid": "application_1", "user": "u",
     "attempts": _ATTEMPTS, "submitted_time": "2017-10-09 06:59:00"},
    {"status": "Killed", "jobid": "application_2", "attempts": [],
     "submitted_time": "2017-10-09 07:00:00"},
]  # fmt: skip
_SACCT = """JobID|Submit|Start|Elapsed|AllocTRES|ReqTRES|State
7|2024-01-02T03:00:00|2024-01-02T03:00:10|00:01:00|cpu=8,gres/gpu:a100=2,gres/gpu=2||COMPLETED
7.batch|2024-01-02T03:00:10|2024-01-02T03:00:10|00:01:00|cpu=8||COMPLETED
8_1|2024-01-02T03:00:30+01:00|2024-01-03T03:00:30|1-02:00:00|gres/gpu:a100=4||CANCELLED by 7
9|2024-01-02T04:00:00|Unknown|00:00:00||gres/gpu=1|PENDING
12+0|2024-01-02T04:00:00|Unknown|05:00.250|billing=4|gres/gpu=1|NODE_FAIL
"""  # noqa: E501 (rows are as sacct prints them)
_TABLE = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:00,0.25,1,0.25,b
2017-10-09 07:00:00,90.5,2,181.0,a
"""
_PLAIN = "name,submitted_s,devices,duration_s\na,0,1,60\nb,30.5,2,1e3\n"
_POLLUX = "name,time,application,num_replicas,batch_size\na,30,tiny,1,8\nb,40,tiny,2,16"
_RUBICK = (
    "name,submission_time,duration,application,num_gpus,exec_plan,steps,is_sla\n"
    "a,0,60,wide,1,ga,10,0\nb,5,60,wide,2,zero,9,1\n"
)
_SPOT = "at_s,node,event\n10,0,leave\n200,0,join\n"

_PLACEMENTS = "placement,local_bsz,step_time,sync_time\n" + "".join(
    f"{where},{local},{0.1 + local / 20 + sync},{sync}\n"
    for where, sync in (("1", 0.0), ("2", 0.05), ("11", 0.2), ("22", 0.3))
    for local in (4, 8, 16)
)
_SCALABILITY = """num_nodes,num_replicas,local_bsz,step_time,sync_time
2,3,4,0.55,0.25
2,3,16,1.1,0.25
"""
_VALIDATION = """progress,iteration,metric,grad_sqr,grad_var
100,100,1,1.0,2.0
200,200,2,1.0,2.0
"""
_WIDE = "exec_plan,placement,iter_time\nga,1,2.0\nga,2,1.0\nzero,11,1.5\n"
_TINY = {
    "placements.csv": _PLACEMENTS,
    "scalability.csv": _SCALABILITY,
    "validation-8.csv": _VALIDATION,
    "validation-32.csv": _VALIDATION,
}
_POLICIES = ("goodput", "fifo", "optimus", "tiresias", "sia")
_NODES = Nodes.parse("1x4:t4+1x4:a100")


def _simulated(
    trace: pathlib.Path,
    tables: Mapping[str, pathlib.Path],
    policy: str,
    events: Sequence[NodeEvent] = (),
) -> None:
    """Simulates the first half hour of a trace, like ``autopar simulate``."""
    made = policy_of(policy)
    jobs = read_trace(trace, tables, _NODES, made).jobs
    options = Options(most_s=1800.0, events=tuple(events))
    metrics(simulate(jobs, _NODES, made, options))


def traces(place: pathlib.Path) -> Format:
    """Files for ``autopar simulate FILE`` and for ``--away``."""
    path, plain = place / "trace", place / "plain.csv"
    plain.write_text(_PLAIN)
    _write(place, {f"tables/tiny/{k}": x.encode() for k, x in _TINY.items()})
    _write(place, {"tables/wide/placements.csv": _WIDE.encode()})
    rubick = {"": place / "rubick"}
    shutil.move(place / "tables" / "wide", place / "rubick" / "wide")

    def read(data: bytes) -> None:
        path.write_bytes(data)
        head = data[:200].partition(b"\n")[0]
        if b"event" in head:
            _simulated(plain, {}, "goodput", spot.read_events(path, _NODES))
            return
        tables = rubick if b"exec_plan" in head else {"": place / "tables"}
        _simulated(path, tables, _POLICIES[len(data) % len(_POLICIES)])

    texts = [_SACCT, _TABLE, _PLAIN, _POLLUX, _RUBICK, _SPOT]
    return Format([json.dumps(_PHILLY).encode(), *(x.encode() for x in texts)], read)


def tables(place: pathlib.Path) -> Format:
    """A trace with ``--tables KIND=DIR``, or with one folder for all kinds."""
    kinds = [kind for kind in dict.fromkeys(_NODES.kinds) if kind]
    one = {"trace.csv": _POLLUX} | {f"all/tiny/{k}": x for k, x in _TINY.items()}
    several = {"trace.csv": _RUBICK} | {
        f"{k}/wide/placements.csv": _WIDE for k in kinds
    }

    def read(data: bytes) -> None:
        try:
            parts, _ = zip_parts(data)
        # The archive only transports the files, so its own errors do not count.
        except Exception as error:
            raise ScheduleError("the archive is damaged") from error
        here = place / "case"
        shutil.rmtree(here, ignore_errors=True)
        _write(here, {k: x for k, x in parts.items() if k in one or k in several})
        found = {k: here / k for k in kinds if (here / k).is_dir()}
        _simulated(
            here / "trace.csv", found or {"": here / "all"}, _POLICIES[len(data) % 3]
        )

    seeds = [
        zip_of({name: text.encode() for name, text in parts.items()})
        for parts in (one, several)
    ]
    return Format(seeds, read, None, zip_parts)


def _write(place: pathlib.Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
