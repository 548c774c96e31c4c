"""Small tables of programs, and traces, for the scheduler's tests."""

from __future__ import annotations

import pathlib

HEAD = "name,time,application,num_replicas,batch_size"


def write_tables(folder: pathlib.Path, name: str = "tiny") -> pathlib.Path:
    """Writes a program's tables: 4 epochs of 100 steps of 8 samples, on 2x2 devices."""
    where = folder / name
    where.mkdir(parents=True)
    rows = ["placement,local_bsz,step_time,sync_time"]
    for placement, sync in (("1", 0.0), ("2", 0.05), ("11", 0.2), ("22", 0.3)):
        for local in (4, 8, 16):
            rows.append(f"{placement},{local},{0.1 + 0.05 * local + sync},{sync}")
    (where / "placements.csv").write_text("\n".join(rows))
    columns = "num_nodes,num_replicas,local_bsz,step_time,sync_time"
    (where / "scalability.csv").write_text(
        f"{columns}\n2,3,4,0.55,0.25\n2,3,16,1.1,0.25"
    )
    for batch in (8, 32):
        lines = ["progress,iteration,metric,grad_sqr,grad_var"]
        for epoch in range(1, 5):
            steps = 100 * epoch * 8 // batch
            lines.append(f"{100 * epoch},{steps},{epoch},1.0,2.0")
        (where / f"validation-{batch}.csv").write_text("\n".join(lines))
    return folder


def write_trace(folder: pathlib.Path, rows: list[str]) -> pathlib.Path:
    """Writes a trace next to the tables, as in the published data."""
    (folder / "workloads").mkdir(exist_ok=True)
    write_tables(folder / "traces")
    path = folder / "workloads" / "trace.csv"
    path.write_text("\n".join([HEAD, *rows]))
    return path
