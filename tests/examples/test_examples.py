"""Tests that every example trains, and that its workload is the trained step."""

import functools
import importlib
import inspect
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

EXAMPLES = Path(__file__).parents[2] / "examples"

TEXT = {"layers": 1, "d_model": 32, "seq": 16, "batch": 8}
WIDE = TEXT | {"d_model": 128}  # adafactor factors matrices from 128 up
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", TEXT | {"layers": 2, "clip": 1.0}),
    "gpt_scan": ("gpt", TEXT | {"scan": True, "remat": True, "optimizer": "sgd"}),
    "gpt_dropout": ("gpt", TEXT | {"dropout": 0.1, "dtype": "bfloat16"}),
    "gpt_adafactor": ("gpt", WIDE | {"optimizer": "adafactor"}),
    "gpt_lion": ("gpt", WIDE | {"optimizer": "lion"}),
    "gpt_nnx": ("gpt_nnx", TEXT),
    "gpt_nnx_scan": ("gpt_nnx", TEXT | {"scan": True, "remat": True, "dropout": 0.1}),
    "llama": ("llama", TEXT | {"heads": 4, "kv_heads": 2, "ffn": 64}),
    "moe": ("moe", TEXT | {"layers": 2, "experts": 4, "ffn": 64}),
    "lstm": ("lstm", TEXT | {"d_model": 256}),
    "vit": ("vit", {"layers": 1, "d_model": 32, "size": 16, "classes": 4}),
    "resnet": ("resnet", {"stages": 2, "blocks": 1, "width": 8, "classes": 4}),
    "recommendation": (
        "recommendation",
        {"tables": 2, "rows": 64, "width": 8, "hidden": 64, "batch": 512},
    ),
}


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def shapes(tree: Any) -> list[tuple[str, tuple[int, ...], str]]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return [(jax.tree_util.keystr(k), x.shape, str(x.dtype)) for k, x in leaves]


class Trained(NamedTuple):
    state_shapes: list[tuple[str, tuple[int, ...], str]]
    losses: list[float]


@functools.cache  # two tests look at each, and compiling it is what takes the time
def trained(example: str) -> Trained:
    name, options = TINY[example]
    run = load(name).training(**options)
    state = nnx.jit(run.create_state)(jax.random.key(0))
    step = load("example_training").plain_step(run)
    return Trained(shapes(state), train(run, step, state, steps=15))


def train(run: Any, step: Any, state: Any, steps: int) -> list[float]:
    losses = []
    for batch in itertools.islice(run.batches(seed=0), steps):
        state, loss = load("example_training").take_step(step, state, batch)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("example", TINY)
def test_workload_has_the_shapes_of_training(example: str) -> None:
    name, options = TINY[example]

    _, state, batch = load(name).workload(**options)

    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    assert shapes(state) == trained(example).state_shapes
    batches = load(name).training(**options).batches(seed=0)
    assert shapes(batch) == shapes(next(batches))


@pytest.mark.parametrize("example", TINY)
def test_loss_decreases(example: str) -> None:
    losses = trained(example).losses

    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < losses[0] - 0.2


def test_same_seed_gives_same_losses() -> None:
    run = load("gpt").training(**TEXT, dropout=0.1, scan=True)
    step = load("example_training").plain_step(run)
    create = nnx.jit(run.create_state)

    first, second = (
        train(run, step, create(jax.random.key(0)), steps=3) for _ in range(2)
    )

    assert first == second


def test_options_are_typed_and_have_defaults() -> None:
    for name in {name for name, _ in TINY.values()}:
        for option in inspect.signature(load(name).workload).parameters.values():
            assert option.annotation in (int, float, bool, str)
            assert isinstance(option.default, option.annotation)


@pytest.mark.parametrize(("name", "scan"), [("gpt", False), ("gpt_nnx", True)])
def test_gpt3_is_described_without_memory(name: str, scan: bool) -> None:
    layers, d_model, vocab, seq = 96, 12288, 50257, 2048

    _, state, batch = load(name).workload(
        layers=layers, d_model=d_model, heads=96, vocab=vocab, seq=seq, scan=scan
    )

    block = 12 * d_model**2 + 13 * d_model  # matrices; biases, scales and offsets
    expected = layers * block + (vocab + seq + 2) * d_model
    params = nnx.state(state[0], nnx.Param) if name == "gpt_nnx" else state.params
    assert sum(x.size for x in jax.tree.leaves(params)) == expected
    assert batch["inputs"].shape == (16, seq)


def test_llama_8b_has_its_number_of_parameters() -> None:
    _, (params, _), _ = load("llama").workload(
        layers=32, d_model=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256
    )

    assert sum(x.size for x in jax.tree.leaves(params)) == 8_030_261_248


def test_experts_take_no_more_than_their_capacity() -> None:
    gates = jax.nn.softmax(jax.random.normal(jax.random.key(0), (3, 16, 4)) * 3)

    combine, balance = load("moe").route(gates, capacity=5)

    in_slot = np.asarray(combine > 0).sum(axis=1)  # tokens in a slot of an expert
    assert in_slot.max() == 1
    weight = np.asarray(combine.sum(axis=(2, 3)))
    assert (weight <= 1 + 1e-6).all()
    assert float(balance) > 0


def test_uncrowded_experts_take_every_token() -> None:
    gates = jax.nn.softmax(jax.random.normal(jax.random.key(0), (3, 16, 4)))

    combine, _ = load("moe").route(gates, capacity=32)

    best_two = np.sort(gates, axis=-1)[..., 2:]
    expected = np.sort(best_two / best_two.sum(axis=-1, keepdims=True), axis=-1)
    weights = np.sort(combine.sum(axis=-1), axis=-1)[..., 2:]
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_rotary_scores_depend_on_distance_only() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, 8))
    rotated = load("llama").rotate(np.repeat(x, 6, axis=1))[0, :, 0]

    scores = rotated @ rotated.T

    for distance in range(6):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)


def test_main_trains_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--plain", "--steps", "2", "layers=1", "d_model=16", "scan=true"]
    monkeypatch.setattr(sys, "argv", ["gpt.py", *words])

    load("gpt").main()

    assert capsys.readouterr().out.count("loss") == 2


def test_unknown_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt.py", "--plain", "depth=1"])

    with pytest.raises(SystemExit, match="no option 'depth'; known: layers=4"):
        load("gpt").main()


def test_text_targets_are_the_next_inputs() -> None:
    batch = next(load("example_data").text_batches(4, 32))

    assert (batch["inputs"][:, 1:] == batch["targets"][:, :-1]).all()
    assert batch["inputs"].max() < 128
