"""Runs autopar on the installed JAX, and compares the results with `jax.jit`.

`make jax-versions` runs it with the oldest and the newest release that pyproject.toml
allows. It uses only public names and takes some seconds.
"""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import autopar

DEVICES, WIDTH, ROWS = 8, 32, 64
OPTIMIZER = optax.adam(1e-2)
# Name -> options of the planner for a run.
RUNS: dict[str, dict[str, Any]] = {
    "one stage": {},
    "microbatches": {"microbatches": 4},
    "stages": {"stages": 2, "microbatches": 4},
}


def create_state(key: jax.Array) -> Any:
    """Four layers in a loop, a head, and Adam's state."""
    body, head = jax.random.split(key)
    params = {
        "body": 0.2 * jax.random.normal(body, (4, WIDTH, WIDTH)),
        "head": 0.2 * jax.random.normal(head, (WIDTH, WIDTH)),
    }
    return params, OPTIMIZER.init(params)


def step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
    """One training step of this model."""

    def loss_of(params: Any) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(x @ w) + x, None

        x, _ = jax.lax.scan(layer, batch, params["body"])
        return jnp.mean((x @ params["head"] - batch) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def losses(run: Any, state: Any, batches: Any) -> list[float]:
    """The losses of some steps."""
    found: list[float] = []
    for batch in batches:
        *state, loss = run(*state, batch)
        found.append(float(loss))
    return found


def check_plain(batches: Any) -> None:
    """Checks that plans of all kinds train like `jax.jit`."""
    key = jax.random.key(0)
    expected = losses(jax.jit(step), create_state(key), batches)
    for name, options in RUNS.items():
        run = autopar.parallelize(step, cluster=f"{DEVICES}:cpu", **options)
        state = run.init(create_state, key, batch=batches[0])
        np.testing.assert_allclose(losses(run, state, batches), expected, rtol=1e-5)
        print(f"  {name}: losses as under jit")


def check_changes(batches: Any) -> None:
    """Checks codecs, a change of the cluster, and a checkpoint."""
    run: Any = autopar.parallelize(
        step,
        cluster="4x2:cpu,network=10Mb/s",
        compression="int8",
        axis_names=("data", "tensor"),
        pins={"params/*": P(), "batch": P("data")},
    )
    state = run.init(create_state, jax.random.key(0), batch=batches[0])
    params, opt_state, before = run(*state, batches[0])
    assert run.plan is not None
    assert {gradient.codec for gradient in run.plan.gradients} == {"int8"}
    params, opt_state = run.replan("4x1:cpu,network=10Mb/s", (params, opt_state))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = autopar.Checkpoints(pathlib.Path(folder))
        checkpoints.save(run, (params, opt_state), step=1)
        checkpoints.wait()
    *_, after = run(params, opt_state, batches[1])
    assert float(after) < float(before)
    print("  codecs, another cluster, a checkpoint")


def check_nnx(batches: Any) -> None:
    """Checks a Flax NNX model, which is changed in place."""
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @autopar.parallelize(cluster=f"{DEVICES}:cpu")
    def train(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        def loss_of(model: Any) -> jax.Array:
            return jnp.mean((model(batch) - batch) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    first, *_, last = (float(train(model, optimizer, batch)) for batch in batches)
    assert last < first
    print("  NNX")


def main() -> None:
    """Runs all checks."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(f"jax {jax.__version__}, flax {flax.__version__}")
    random = np.random.default_rng(0)
    batches = random.normal(size=(4, ROWS, WIDTH)).astype(np.float32)
    check_plain(batches)
    check_changes(batches)
    check_nnx(batches)


if __name__ == "__main__":
    main()
