"""Time of the host to issue the tasks of a pipeline.

    python benchmarks/pipeline_dispatch.py [--against OLD] [--stages 2 4] [--turns 5]

Plans the GPT example in stages of one simulated device each, under every schedule.
Prints a JSON line for each schedule: microseconds of all stages to issue a task with
empty programs (which take and return arrays of the same shapes and compute nothing),
and the percentage of the real step. The figures are medians, and the minimum over all
steps: steps, because other load of the machine can only lengthen a step.

``--against`` names another checkout, which is measured in turns with this one: each
turn begins with the checkout that ended the turn before.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import side_by_side

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
# Steps of a turn: with empty programs, and real steps.
EMPTY, REAL = 10, 3
LAYERS = 4  # layers of the GPT; more if there are more parts


def main() -> None:
    """Times each schedule on each number of stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=pathlib.Path, help="another checkout")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--child", help="a request, of a process that this one starts")
    args = parser.parse_args()
    if args.child:
        serve(**json.loads(args.child))
        return
    roots = {"new": side_by_side.ROOT}
    if args.against is not None:
        roots = {"old": args.against.resolve(), **roots}
    for stages, schedule in itertools.product(args.stages, args.schedules):
        request = {
            "stages": stages,
            "schedule": schedule,
            "microbatches": args.microbatches,
        }
        print(json.dumps({**request, **timed(roots, request, args.turns)}), flush=True)


def timed(
    roots: dict[str, pathlib.Path], request: dict[str, Any], turns: int
) -> dict[str, Any]:
    """Measures checkouts in turns; returns their medians."""
    words = [sys.executable, __file__, "--child", json.dumps(request)]
    children = {
        name: subprocess.Popen(
            words,
            env=side_by_side.environment(root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, root in roots.items()
    }
    lines = {name: iter(child.stdout) for name, child in children.items()}
    sizes = {name: side_by_side.answer(lines[name]) for name in children}
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in children}
    for turn in range(turns):
        for name in list(children)[:: 1 if turn % 2 else -1]:
            children[name].stdin.write("go\n")
            children[name].stdin.flush()
            found[name].append(side_by_side.answer(lines[name]))
    for child in children.values():
        child.stdin.close()
        child.wait()
    return {name: row(sizes[name], found[name]) for name in children}


def row(sizes: dict[str, int], found: list[dict[str, list[float]]]) -> dict[str, float]:
    """The reported figures of one checkout."""
    empty = [s for turn in found for s in turn["empty"]]
    real_s = statistics.median(s for turn in found for s in turn["real"])
    empty_s, tasks = statistics.median(empty), sizes["tasks"]
    return {
        **sizes,
        "empty_us_a_task": round(1e6 * empty_s / tasks, 1),
        "least_us_a_task": round(1e6 * min(empty) / tasks, 1),
        "real_step_ms": round(1e3 * real_s, 2),
        "share_percent": round(100 * empty_s / real_s, 2),
    }


def serve(stages: int, schedule: str, microbatches: int) -> None:
    """Runs a turn for each line of standard input."""
    import jax
    import workloads

    import autopar
    from autopar_passes.stages.cut import Phase

    parts = stages * (2 if schedule == "interleaved" else 1)
    training = workloads.training("gpt", batch=32, layers=max(LAYERS, parts))
    state = training.create_state(jax.random.key(0))
    batch = next(training.batches(seed=0))
    step = autopar.parallelize(
        training.step,
        cluster=autopar.Cluster.local(stages),
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
    )
    state, loss = step(state, batch)
    jax.block_until_ready(loss)
    pipeline = step.prepare(state, batch).pipeline
    real = dict(pipeline.calls)
    empty = {
        key: call if key.phase is Phase.UPDATE else emptied(call, pipeline.outputs)
        for key, call in real.items()
    }

    def run(calls: dict[Any, Any], count: int) -> Iterator[tuple[float, float]]:
        """Yields seconds of steps: of the whole step, and of issuing the microbatches'
        tasks.
        """
        nonlocal state
        pipeline.calls.update(calls)
        for _ in range(count):
            begin = time.perf_counter()
            state, loss = step(state, batch)
            jax.block_until_ready((state, loss))
            yield time.perf_counter() - begin, pipeline.issuing_s

    list(run(empty, 2))
    answer({"arrays": len(jax.tree.leaves(state)), "tasks": len(pipeline.order)})
    for _ in sys.stdin:
        real_s = [whole for whole, _ in run(real, REAL)]
        empty_s = [issuing for _, issuing in run(empty, EMPTY)]
        answer({"real": real_s, "empty": empty_s})


def answer(what: Any) -> None:
    """Sends an answer to the process that asked."""
    print(side_by_side.ANSWER + json.dumps(what), flush=True)


def emptied(call: Any, leaving: frozenset[int]) -> Any:
    """A task with the same arguments and results that computes nothing.

    Args:
      call: the task.
      leaving: the values that the step returns, which the next step consumes.
    """
    import jax
    import jax.numpy as jnp

    code = call.code
    made = jax.eval_shape(code.function, *code.in_structs)
    shardings = code.function.lower(*code.in_structs).compile().output_shardings
    zeros = jax.jit(
        lambda: [jnp.zeros(x.shape, x.dtype) for x in made], out_shardings=shardings
    )()
    jax.block_until_ready(zeros)
    kept = len(zeros) - len(code.accumulated)
    fresh = [k for k, value in enumerate(code.outputs) if value in leaving]
    one = jax.jit(
        lambda *arguments: [arguments[0].ravel()[:1]] if arguments else [],
        keep_unused=True,
    )

    def function(*arguments: Any) -> list[Any]:
        one(*arguments)
        out = [*zeros[:kept], *arguments[len(code.inputs) :]]
        for k in fresh:
            out[k] = jnp.copy(out[k])
        return out

    return dataclasses.replace(call, code=dataclasses.replace(code, function=function))


if __name__ == "__main__":
    main()
