"""Tests that each misuse in a table gets one clear error with a remedy.

Each case states what the message must contain. A message that begins with what was
wrong ends with a remedy, an example, or the expected value.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_step
from jax.sharding import PartitionSpec as P

import autopar
from autopar import (
    AutoparError,
    Cluster,
    ClusterError,
    Plan,
    PlanError,
    TraceError,
    parallelize,
    plan,
)
from autopar.compression.policies import topk_levels
from autopar.errors import InputTypeError

EIGHT = "8:cpu"
ROWS, WIDTH = 16, 16
W, X = np.ones((WIDTH, WIDTH), np.float32), np.ones((ROWS, WIDTH), np.float32)
Call = Callable[[], Any]


def step(w: Any, batch: Any) -> Any:
    grad = jax.grad(lambda w: ((batch @ w) ** 2).mean())(w)
    return w - 0.1 * grad, grad.sum()


@pytest.fixture(scope="module")
def good() -> Plan:
    return plan(step, W, X, cluster=EIGHT)


def refused(
    call: Call,
    message: str,
    kind: type[Exception] | tuple[type[Exception], ...] = PlanError,
) -> None:
    """Checks that a call raises one error with the expected text."""
    with pytest.raises(kind, match=message) as found:
        call()
    text = str(found.value)
    assert isinstance(found.value, AutoparError)
    assert "Traceback" not in text
    assert len(text.splitlines()[0]) < 400
    assert text.rstrip()[-1] in ".)'" or "\n" in text


NO_SHAPE = r"is not a shape: write positive sizes.*Example"
NO_BYTES = r"is not a number of bytes: write one such as '40GB'"
NO_DEVICE = r"unknown device.*the presets are .*TOML file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", NO_SHAPE),
        ("cpu", NO_SHAPE),
        ("h100", NO_SHAPE),
        ("0:cpu", NO_SHAPE),
        ("-1:cpu", NO_SHAPE),
        ("2x0:h100", NO_SHAPE),
        ("2xx4:h100", NO_SHAPE),
        ("x:h100", NO_SHAPE),
        ("1e3:h100", NO_SHAPE),
        ("2x3.5:h100", NO_SHAPE),
        ("8:", r"names no device after the colon\. Example"),
        ("8:nothing", NO_DEVICE),
        ("8:cpu:extra", NO_DEVICE),
        ("8 : h 100", NO_DEVICE),
        ("2x4:h100,memory=", NO_BYTES),
        ("2x4:h100,memory=0", NO_BYTES),
        ("2x4:h100,memory=lots", NO_BYTES),
        ("8:h100,memory=-1GB", NO_BYTES),
        ("8:h100,memory=1KB", NO_BYTES),
        ("2x4:h100,colour=red", r"unknown option 'colour=red'.*Example"),
        ("/no/such.toml", r"cannot read the cluster file.*No such file"),
    ],
)
def test_clusters(text: str, message: str) -> None:
    refused(lambda: Cluster.parse(text), message, ClusterError)
    refused(lambda: parallelize(step, cluster=text), message, ClusterError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Cluster.parse("2x4:cpu").slice(None), r"slice: .*\(1, 2\), got None"),
        (lambda: Cluster.parse("2x4:cpu").slice((1, 2), "0"), "offset: .*got '0'"),
        (lambda: Cluster.parse("2x4:cpu").partition(3), "partition: .*got 3"),
        (lambda: Cluster.parse("2x4:cpu").partition([3]), "partition: .*got 3"),
        (lambda: topk_levels("x"), "topk_levels: least: .*got 'x'"),
    ],
)
def test_arguments_of_a_wrong_type(call: Call, message: str) -> None:
    refused(call, message, TypeError)


@pytest.mark.parametrize("given", [8, None, ["8:cpu"], {}])
def test_no_clusters(given: Any) -> None:
    refused(
        lambda: plan(step, W, X, cluster=given),
        r"cluster=.*expected an autopar\.Cluster or its text",
        ClusterError,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", r"unknown codec 'int9'; known: bf16"),
        ("INT8", r"unknown codec 'INT8'; known: bf16"),
        (" ", r"unknown codec ''; known: bf16"),
        ("auto:int8", r"unknown codec 'auto'; known"),
        ("int8;int4", r"unknown codec 'int8;int4'; known"),
        ("powersgd:rank=x", r"rank must be of type int, got 'x'"),
        ("powersgd:rank=0", r"rank must be positive, got 0"),
        ("topk:ratio=2", r"in \(0, 1\]; got 2"),
        ("int8:", r"is not field=value; its fields and their defaults: block=256"),
        ("int8:size=3", r"size"),
    ],
)
def test_codecs(text: str, message: str) -> None:
    refused(lambda: plan(step, W, X, cluster=EIGHT, compression=text), message)
    refused(lambda: parallelize(step, cluster=EIGHT, compression=text), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"error_budget": 0.1}, r"leave it out with compression='none'"),
        ({"compression": "auto", "error_budget": -1}, r"at least 0, such as 0\.05"),
        ({"compression": "auto", "error_budget": np.nan}, r"at least 0, such as"),
        ({"compression": "auto", "error_budget": "x"}, r"at least 0, such as"),
        ({"max_axes": 0}, r"max_axes=0 is too few.*Give 1 or more"),
        ({"max_axes": -1}, r"max_axes=-1 is too few.*Give 1 or more"),
        ({"max_axes": "2"}, r"a whole number such as 2"),
        ({"max_axes": 1.5}, r"a whole number such as 2"),
        ({"cluster": "2x4:h100", "max_axes": 1}, r"has 2 levels.*Give 2 or more"),
        ({"axis_names": ("a", "a")}, r"different names, outermost first"),
        ({"axis_names": "data"}, r"different names, outermost first"),
        ({"axis_names": ()}, r"different names, outermost first"),
        ({"axis_names": (1, 2)}, r"different names, outermost first"),
        ({"axis_names": tuple("abcd")}, r"into 4 mesh axes.*Give fewer names"),
        ({"seconds": -1}, r"more than 0, or None for no limit"),
        ({"seconds": 0}, r"more than 0, or None for no limit"),
        ({"seconds": "10"}, r"in seconds, such as 10\.0"),
        ({"pins": {"nothing": P("data")}}, r"matches no input; inputs are named like"),
        ({"pins": {"w": P("zz")}}, r"no mesh axis 'zz'; the mesh has.*axis_names="),
        ({"pins": {"w": P(None, None, "data")}}, r"more entries than shape"),
        ({"pins": {"w": P("data", "data")}}, r"uses a mesh axis twice"),
        ({"pins": {"w": "data"}}, r"a dictionary of jax\.sharding\.PartitionSpec"),
        ({"pins": [("w", P("data"))]}, r"expected a dictionary of"),
        ({"logical_axis_rules": "embed"}, r"expected pairs of a logical name"),
        ({"logical_axis_rules": {"embed": "x"}}, r"expected pairs of a logical name"),
        ({"layouts": 3}, r"expected an autopar\.Plan, or the path of its JSON file"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_options_of_planning(options: dict[str, Any], message: str) -> None:
    refused(lambda: plan(step, W, X, **({"cluster": EIGHT} | options)), message)


def test_what_cannot_be_split() -> None:
    odd = W[:15, :15], X[:, :15]
    refused(
        lambda: plan(step, W, X[:3], cluster=EIGHT),
        r"cannot be split.*\n.*try: a batch of 8, or split_batch=False.* last_batch=",
    )
    refused(
        lambda: plan(step, W, X[:12], cluster=EIGHT, microbatches=4),
        r"is 3 \('batch', in each of 4 .*\n.*try: microbatches=3, a batch of 32, ",
    )
    refused(
        lambda: plan(step, *odd, cluster=EIGHT, pins={"w": P("data")}),
        r"a dimension of 15 cannot be split",
    )


@pytest.mark.parametrize("how", ["run", "drop", "pad"])
def test_batches_without_rows(how: Any) -> None:
    """Also of a step that was planned for rows, whose state stays as it was."""
    message = r"the batch has 0 rows: 'batch' has shape \(0, 16\).*leave empty batches"
    refused(lambda: plan(step, W, X[:0], cluster=EIGHT), message)
    refused(lambda: plan(step, W, X[:0], cluster=EIGHT, stages=2), message)
    run = parallelize(step, cluster=EIGHT, last_batch=how)
    w = run.init(lambda: jnp.asarray(W), batch=X)
    refused(lambda: run(w, X[:0]), message)
    run(w, X)


def test_empty_arrays_beside_rows() -> None:
    """A batch of graphs may have no edge."""

    def on_graph(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            h = batch["nodes"] @ w
            near = (
                jnp.zeros_like(h).at[batch["edges"][:, 0]].add(h[batch["edges"][:, 1]])
            )
            return ((h + near) ** 2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    graph = {"nodes": X, "edges": np.zeros((0, 2), np.int32)}
    made = plan(on_graph, W, graph, cluster=EIGHT, microbatches=1)
    assert made.written_shapes["batch/edges"] == (0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": 8}, r"expected an autopar\.Cluster or its text"),
        ({"plan": 3}, r"expected an autopar\.Plan, or the path"),
        ({"plan": {}}, r"expected an autopar\.Plan, or the path"),
        ({"devices": []}, r"names no device: leave it out for all"),
        ({"programs": 0}, r"at least 1; the default is 8"),
        ({"programs": "8"}, r"at least 1; the default is 8"),
        ({"policy": object()}, r"no effect without codecs; give compression="),
        ({"fallback": "int8"}, r"no effect without codecs; give compression="),
        ({"compression": "int8", "fallback": "int9"}, r"unknown codec 'int9'; known"),
        ({"least_gain": "x"}, r"a number of at least 0"),
        ({"least_gain": -0.1}, r"a number of at least 0"),
        ({"telemetry_every": 0}, r"expected a number of steps, at least 1"),
        ({"telemetry_every": 2.0}, r"expected a number of steps, at least 1"),
        ({"last_batch": "skip"}, r"expected 'run'.*'drop'.*or 'pad'"),
        ({"last_batch": None}, r"expected 'run'.*'drop'.*or 'pad'"),
        ({"cache": __file__}, r"cannot be used as a folder"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_options_of_the_decorator(options: dict[str, Any], message: str) -> None:
    kind = ClusterError if "cluster" in options else PlanError
    refused(lambda: parallelize(step, **options), message, kind)


@pytest.mark.parametrize("given", [3, True, [3], ("batch", None), b"batch"])
@pytest.mark.parametrize("role", ["batch", "frozen", "static", "whole"])
def test_names_of_arguments_are_texts(role: str, given: Any) -> None:
    """For the decorator, and for a plan."""
    option: dict[str, Any] = {f"{role}_argnames": given}
    message = rf"{role}_argnames=: expected names of the step's arguments.*'batch'"
    refused(lambda: parallelize(step, **option), message, InputTypeError)
    refused(lambda: plan(step, W, X, cluster=EIGHT, **option), message, InputTypeError)


@pytest.mark.parametrize("role", ["batch", "frozen", "static", "whole"])
def test_names_that_no_argument_has(role: str, good: Plan) -> None:
    """For a plan, an audit, the decorator and a function beside the step."""
    option: dict[str, Any] = {f"{role}_argnames": ["batch", "btach"]}
    if role == "frozen":
        option = {"frozen_argnames": "btach"}
    wanted = rf"{role}_argnames='btach'.* argument.* w, batch\."
    refused(lambda: plan(step, W, X, cluster=EIGHT, **option), wanted, TraceError)
    refused(
        lambda: autopar.audit(step, W, X, plan=good, **option),
        wanted,
        TraceError,
    )
    refused(
        lambda: parallelize(step, cluster=EIGHT, **option)(W, X), wanted, TraceError
    )
    if role in ("static", "whole"):
        run = parallelize(step, cluster=EIGHT)
        run(W, X)
        refused(lambda: run.jit(step, **option)(W, X), wanted, (TraceError, PlanError))


def test_static_arguments_of_any_name() -> None:
    """Of a step with ``*args`` or ``**flags``, and of a method."""

    def by_position(*args: Any) -> Any:
        return step(*args[:2])

    def by_keyword(w: Any, batch: Any, **flags: Any) -> Any:
        return step(w, batch)

    class Trainer:
        @parallelize(cluster=EIGHT, static_argnames="self")
        def step(self, w: Any, batch: Any) -> Any:
            return step(w, batch)

    options: dict[str, Any] = {"cluster": EIGHT}
    plan(by_position, W, X, 3, static_argnames="args2", **options)
    plan(by_keyword, W, X, static_argnames="flag", kwargs={"flag": 3}, **options)
    Trainer().step(W, X)


@pytest.mark.parametrize("dim", ["0", 1.5, (0,)])
def test_dimensions_of_rows_are_whole_numbers(dim: Any) -> None:
    message = r"batch_argnames=\{'batch': \.\.\.\}: expected a dimension or None"
    batch = {"batch": dim}
    refused(lambda: parallelize(step, batch_argnames=batch), message, InputTypeError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": EIGHT}, r"give cluster= or plan=, not both"),
        (
            {"compression": "int8"},
            r"no effect with plan=.*layouts=plan",
        ),
        ({"layouts": None}, r"layouts= has no effect with plan="),
        ({"policy": object()}, r"no effect without codecs"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_options_beside_a_plan(good: Plan, options: Any, message: str) -> None:
    given = {name: good if x is None else x for name, x in options.items()}
    refused(lambda: parallelize(step, plan=good, **given), message)


@pytest.mark.parametrize("given", [None, 3, "step", [step]])
def test_no_step(given: Any) -> None:
    refused(lambda: parallelize(cluster=EIGHT)(given), r"expected a train step")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", r"not a plan: .*Plans are written by Plan\.save"),
        (lambda text: "[]", r"not a plan: Expected `object`"),
        (lambda text: text[:300], r"not a plan: Input data was truncated"),
        (lambda text: changed(text, schema=99), r"has schema 99.*Make the plan again"),
        (lambda text: changed(text, stages=None), r"not a plan: .*stages"),
        (lambda text: None, r"cannot be read: No such file"),
    ],
    ids=["empty", "list", "cut", "newer", "no stages", "missing"],
)
def test_plan_files(
    good: Plan, tmp_path: pathlib.Path, damage: Any, message: str
) -> None:
    path = tmp_path / "plan.json"
    good.save(path)
    text = damage(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    refused(lambda: parallelize(step, plan=path), message)
    refused(lambda: autopar.audit(step, W, X, plan=path), message)


def changed(text: str, **fields: Any) -> str:
    found = json.loads(text) | fields
    return json.dumps({k: v for k, v in found.items() if v is not None})


def test_a_plan_for_another_step(good: Plan) -> None:
    another = r"the plan belongs to another step .*Make a new plan"
    refused(lambda: parallelize(lambda w, b: (w * 2, b), plan=good)(W, X), another)
    refused(lambda: parallelize(step, plan=good)(W[:8, :8], X[:, :8]), another)
    refused(lambda: autopar.audit(lambda w, b: w, W, X, plan=good), another)
    alike = "it is another program: the inputs have the same names and shapes"

    def other(w: Any, batch: Any) -> Any:
        return step(w, jnp.tanh(batch))

    refused(lambda: parallelize(other, plan=good)(W, X), alike)
    refused(lambda: autopar.plan(other, W, X, cluster=EIGHT, layouts=good), alike)


@pytest.mark.cluster
def test_forked_processes() -> None:
    """A fork of a process in which JAX ran is refused at once; one before that runs."""
    program = """if True:
        import os, numpy as np, autopar
        def step(w, x): return w + x.sum(), x.sum()
        step = autopar.parallelize(step, cluster="1:cpu")
        w, x = np.zeros(()), np.ones((4, 2))
        for number in range(2):
            if not (child := os.fork()):
                try: print(number, step(w, x)[1], flush=True)
                except autopar.AutoparError as error: print(number, error, flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            step(w, x)
    """
    words = [sys.executable, "-c", program]
    found = subprocess.run(words, check=True, capture_output=True, timeout=120)
    first, second = found.stdout.decode().splitlines()
    assert first == "0 8.0"
    assert re.match("1 this process was forked from one in which JAX ran", second)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"nothing": P("data")}, r"matches no input; inputs are named like"),
        ({"w": P("zzz")}, r"no mesh axis 'zzz'; the mesh has"),
        ({"w": P("x", "x")}, r"uses a mesh axis twice"),
        ({"w": P(None, None, "x")}, r"more entries than shape"),
        ("w", r"expected a dictionary of path patterns"),
    ],
)
def test_edits(good: Plan, layouts: Any, message: str) -> None:
    refused(lambda: good.edit(layouts), message)


NO_TYPE = r"which is no JAX type"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": ["x"]}, rf"'batch/a/0' is of type str, {NO_TYPE}"),
        ({"a": object()}, rf"'batch/a' is of type object, {NO_TYPE}"),
        (np.array([None]), r"'batch' is an array of dtype object"),
        (np.array(["a"]), r"'batch' is an array of dtype <U1"),
        (np.array(["2020-01-01"], "M8[D]"), r"'batch' is an array of dtype datetime64"),
        ({1, 2}, rf"'batch' is of type set, {NO_TYPE}"),
    ],
)
def test_arguments(batch: Any, message: str) -> None:
    run = parallelize(lambda w, batch: w, cluster=EIGHT)
    refused(lambda: run(W, batch), message, TraceError)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda w, b: w if b.sum() > 0 else -w,
            r"boolean conversion.*\n.*\n.*try",
        ),
        (lambda w, b: (w, float(b.sum())), r"concrete value is expected"),
        (lambda w, b: (w, np.asarray(b)), r"numpy\.ndarray conversion"),
        (lambda w, b: (w, b @ np.ones((3, 3))), r"contracting dimensions"),
        (lambda w, b: (w, "text"), rf"'result/1' is of type str, {NO_TYPE}"),
        (lambda w, b: (w, object()), rf"'result/1' is of type object, {NO_TYPE}"),
        (lambda w: w, r"takes 1 positional argument but 2 were given"),
        (lambda w, b, c: w, r"missing 1 required positional argument: 'c'"),
        (jax.pmap(step), r"is a jax\.pmap: pass the function itself"),
    ],
    ids=range(9),
)
def test_steps(function: Any, message: str) -> None:
    w = np.copy(W)
    refused(lambda: parallelize(function, cluster=EIGHT)(w, X), message, TraceError)
    np.testing.assert_array_equal(w, W)


def test_calls_by_wrong_names() -> None:
    run = parallelize(step, cluster=EIGHT)
    refused(lambda: run(W, btach=X), r"missing a required argument", TraceError)
    refused(lambda: run(W, X, w=W), r"multiple values for argument 'w'", TraceError)


def test_devices() -> None:
    def run(cluster: str, devices: Any = None) -> Call:
        return lambda: parallelize(step, cluster=cluster, devices=devices)(W, X)

    refused(run(EIGHT, [99]), r"devices=\[99\]: not among the devices")
    refused(run("2:cpu", [0, 0]), r"a device stands twice")
    refused(run("16:cpu"), r"for 16 devices .* there are 8\..*jax_num_cpu_devices', 16")
    refused(run(EIGHT, [0, 1]), r"for 8 devices .*, and to run it there are 2")


EARLY = r"no plan yet|needs a step that|no step has run yet with"


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.plan,
        lambda s: s.telemetry,
        lambda s: s.recode({}),
        lambda s: s.replan("4:cpu", W),
        lambda s: s.jit(lambda w: w)(W),
        lambda s: s.shardings(W),
    ],
    ids=["plan", "telemetry", "recode", "replan", "jit", "shardings"],
)
def test_before_the_first_call(use: Callable[[Any], Any]) -> None:
    refused(lambda: use(parallelize(step, cluster=EIGHT)), EARLY)


@pytest.fixture(scope="module")
def run() -> Any:
    return parallelize(step, cluster=EIGHT, donate=False)


class TestAfterAStep:
    """A refused call changes nothing: the step goes on with the state it had."""

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            (
                lambda s: s.recode({"w": "int8"}),
                r"no gradient.*compression=",
            ),
            (lambda s: s.recode("int8"), r"expected a dictionary.*or 'auto'"),
            (lambda s: s.replan("4:nothing", W), NO_DEVICE),
            (
                lambda s: s.replan("16:cpu", W),
                r"for 16 devices .*, and to run it there are 8",
            ),
            (lambda s: s.replan("2:cpu", W, devices=[0, 77]), r"not among the devices"),
            (lambda s: s.replan("4:cpu", W[:3]), r"is not what the step's first"),
            (lambda s: s.replan("4:cpu", "w"), r"is not what the step's first"),
            (lambda s: s.replan("4:cpu", W, plan="no.json"), r"cannot be read"),
            (
                lambda s: s.replan("4:cpu", W, plan=small_step.plan("4:cpu")),
                r"belongs to another step",
            ),
            (lambda s: s.shardings(W[:3]), r"is not what the step's first"),
            (lambda s: s.init(W), r"init expects a function"),
            (
                lambda s: s.init(lambda: W, batch=X, others=(X,)),
                r"not both: others=",
            ),
            (lambda s: s.init(lambda: W, batch=X[:, :3]), r"contracting dimensions"),
            (lambda s: s(W, X[:, :3]), r"contracting dimensions"),
            (lambda s: s(W, "text"), r"shape|type"),
        ],
        ids=range(15),
    )
    def test_state_intact(self, run: Any, use: Any, message: str) -> None:
        before, _ = run(W, X)
        with pytest.raises(AutoparError, match=message):
            use(run)
        after, _ = run(W, X)
        np.testing.assert_array_equal(before, after)


def test_a_state_that_was_consumed() -> None:
    run = parallelize(step, cluster=EIGHT)
    w = run.init(lambda: jnp.asarray(W), batch=X)
    run(w, X)
    refused(lambda: run(w, X), r"'w' was consumed.*donate=False")


def test_memory() -> None:
    refused(
        lambda: plan(step, W, X, cluster="8:h100,memory=1kB"),
        r"memory",
        autopar.InfeasibleError,
    )
