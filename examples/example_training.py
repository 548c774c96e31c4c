"""What the examples share: one shape for all of them, and their command line.

Every example has a function ``training(**options)`` that returns a ``Training``. From
it follow ``workload(**options)``, the same without allocating anything, for planning;
and ``main()``, which trains::

    python examples/gpt.py --steps 50 --devices 8 layers=2 d_model=64
    python examples/gpt.py --plain          # under jax.jit, as the baseline
"""

import argparse
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx


class Training(NamedTuple):
    """A model in training: everything a loop needs.

    A state that is a tuple holds the leading arguments of the step, one each:

    * ``step(state, batch) -> (state, loss)`` with a Linen ``TrainState``;
    * ``step(params, opt_state, batch) -> (params, opt_state, loss)`` with the state
      ``(params, opt_state)``;
    * ``step(model, optimizer, batch) -> loss`` with the state ``(model, optimizer)``
      of NNX objects, which the step changes in place.
    """

    step: Callable[..., Any]
    create_state: Callable[[jax.Array], Any]  # from a random key
    batches: Callable[..., Iterator[Any]]  # batches(seed=0) yields numpy arrays
    batch: Any  # the shapes of one batch


def take_step(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, Any]:
    """Takes one step of any form and returns ``(state, loss)``."""
    if not isinstance(state, tuple):
        return step(state, batch)
    outputs = step(*state, batch)
    if not isinstance(outputs, tuple):
        return state, outputs  # the step has changed the state in place
    *state, loss = outputs
    return tuple(state), loss


def workload_of(training: Callable[..., Training]) -> Callable[..., Any]:
    """Makes the ``workload`` of an example from its ``training``.

    The function takes the same options and returns ``(step, state, batch)``, with the
    state and the batch as ``jax.ShapeDtypeStruct``: no model is too large.
    """

    @functools.wraps(training)  # the signature: the options with types and defaults
    def workload(**options: Any) -> tuple[Callable[..., Any], Any, Any]:
        run = training(**options)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return run.step, nnx.eval_shape(run.create_state, key), run.batch

    workload.__name__ = workload.__qualname__ = "workload"
    workload.__doc__ = "The step and the shapes of its state and batch, for planning."
    return workload


def make_optimizer(name: str, clip: float = 0.0) -> optax.GradientTransformation:
    """An optimizer by name, after clipping to the global norm ``clip`` if positive."""
    optimizers = {
        "adamw": lambda: optax.adamw(1e-3, b2=0.95, weight_decay=0.1),
        "adam": lambda: optax.adam(1e-2),
        "sgd": lambda: optax.sgd(0.1, momentum=0.9),
        "adafactor": lambda: optax.adafactor(1e-2),
        "lion": lambda: optax.lion(5e-4, weight_decay=0.1),
    }
    if name not in optimizers:
        raise ValueError(f"optimizer must be one of {', '.join(optimizers)}: {name!r}.")
    optimizer = optimizers[name]()
    return (
        optax.chain(optax.clip_by_global_norm(clip), optimizer) if clip else optimizer
    )


def main(training: Callable[..., Training]) -> None:
    """Trains an example as the command line says."""
    parser = argparse.ArgumentParser(
        description=inspect.getmodule(training).__doc__,
        epilog=f"options: {_describe_options(training)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--devices", type=int, help="simulate this many CPU devices")
    parser.add_argument("--plain", action="store_true", help="use jax.jit, not autopar")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", metavar="option=value")
    arguments = parser.parse_intermixed_args()
    if arguments.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    run = training(**_parse_options(training, arguments.options))
    start = _start_plain if arguments.plain else _start_planned
    step, state = start(run, jax.random.key(arguments.seed))
    batches = itertools.islice(run.batches(arguments.seed), arguments.steps)
    _train(step, state, batches)
    if not arguments.plain:
        print(step.plan)


def _start_planned(run: Training, key: jax.Array) -> tuple[Any, Any]:
    import autopar  # here, because the plain baseline needs only JAX

    step = autopar.parallelize(cluster=autopar.Cluster.local())(run.step)
    return step, step.init(run.create_state, key)


def _start_plain(run: Training, key: jax.Array) -> tuple[Any, Any]:
    return plain_step(run), nnx.jit(run.create_state)(key)


def plain_step(run: Training) -> Callable[..., Any]:
    """The step compiled for one device; it consumes the state that it is given."""
    state = nnx.eval_shape(run.create_state, jax.eval_shape(lambda: jax.random.key(0)))
    if not isinstance(state, tuple):
        return jax.jit(run.step, donate_argnums=0)
    donated = tuple(range(len(state)))
    mutates = any(isinstance(part, nnx.Module) for part in state)
    return (nnx.jit if mutates else jax.jit)(run.step, donate_argnums=donated)


def _train(step: Callable[..., Any], state: Any, batches: Iterator[Any]) -> None:
    for i, batch in enumerate(batches):
        started_s = time.perf_counter()
        state, loss = take_step(step, state, batch)
        loss = float(loss)  # waits for the step to end
        step_ms = 1e3 * (time.perf_counter() - started_s)
        print(f"step {i:4d}  loss {loss:8.4f}  {step_ms:9.1f} ms", flush=True)


def _options(training: Callable[..., Training]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(training).parameters)


def _describe_options(training: Callable[..., Training]) -> str:
    return " ".join(f"{o.name}={o.default}" for o in _options(training).values())


def _parse_options(training: Callable[..., Training], words: list[str]) -> Any:
    """``["layers=2", "scan=true"]`` as arguments of the annotated types."""
    known, values = _options(training), {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known:
            raise SystemExit(
                f"no option {name!r}; known: {_describe_options(training)}"
            )
        kind = known[name].annotation
        values[name] = value.lower() in ("1", "true") if kind is bool else kind(value)
    return values
