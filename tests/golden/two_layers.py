"""A small step for tests of the command line: a chain of products, trained by Adam.

``autopar plan tests/golden/two_layers.py:workload --cluster 2x4:cpu`` prints the
content of ``two_layers_2x4_cpu.txt``, and then the times of planning.
"""

import jax
import jax.numpy as jnp
import optax


def train_step(params, opt_state, batch):
    """One step on the mean squared error."""

    def loss_fn(params):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optax.adam(1e-2).update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def workload(
    layers: int = 2, width: int = 256, batch: int = 256, dtype: str = "float32"
):
    """The step, and the shapes of its state and batch."""
    if layers < 1:
        raise ValueError(f"layers must be positive, got {layers}.")
    layer = {
        "kernel": jax.ShapeDtypeStruct((width, width), dtype),
        "bias": jax.ShapeDtypeStruct((width,), dtype),
    }
    params = [layer] * layers
    opt_state = jax.eval_shape(optax.adam(1e-2).init, params)
    rows = jax.ShapeDtypeStruct((batch, width), dtype)
    return train_step, (params, opt_state), {"x": rows, "y": rows}
