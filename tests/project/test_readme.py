"""What the README and the other pages say is true."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkout
import jax
import optax
import pytest
from flax.training import train_state

import autopar
from autopar.cluster import Cluster

README = (checkout.ROOT / "README.md").read_text()
PAGES = [*checkout.ROOT.glob("*.md"), *(checkout.ROOT / "docs").rglob("*.md")]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands() -> set[str]:
    """The subcommands of autopar that the README shows."""
    shown = "\n".join([*blocks("sh"), *re.findall(r"`([^`\n]+)`", README)])
    return set(re.findall(r"^autopar ([a-z]+)", shown, re.M))


@pytest.mark.parametrize("page", PAGES, ids=checkout.relative)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())

    assert [x for x in targets if not (page.parent / x).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=checkout.relative)
def test_make_targets_exist(page: Path) -> None:
    makefile = (checkout.ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))

    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.M)) <= targets


def test_python_examples_use_what_exists() -> None:
    nodes = [n for source in blocks("python") for n in ast.walk(ast.parse(source))]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "autopar"
    }

    assert used <= set(autopar.__all__)


def test_the_decorated_step_trains() -> None:
    names = surroundings()
    exec(compile(blocks("python")[0], "README.md", "exec"), names)

    assert math.isfinite(names["loss"])
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(names["state"])} == {4}


def test_the_compressed_step_trains() -> None:
    names = surroundings() | {"autopar": autopar, "jax": jax}
    exec(compile(blocks("python")[2], "README.md", "exec"), names)
    step = names["train_step"]
    state = step.init(names["create_state"], names["rng"])
    for batch in names["batches"]:
        state, loss = step(state, batch)

    assert math.isfinite(loss)
    assert step.plan.compression.mode == "auto"


def test_the_plan_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = surroundings()
    names |= {
        "train_step": train_step,
        "state": jax.eval_shape(create_state, names["rng"]),
        "batch": jax.ShapeDtypeStruct((64, 64), "float32"),
    }
    exec(compile(blocks("python")[1], "README.md", "exec"), names)

    assert autopar.Plan.load("plan.json") == names["plan"]


def create_state(rng: jax.Array) -> train_state.TrainState:
    params = {"w": jax.random.normal(rng, (64, 64))}
    return train_state.TrainState.create(
        apply_fn=None, params=params, tx=optax.sgd(1e-3)
    )


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return ((batch @ params["w"]) ** 2).mean()


def train_step(state: train_state.TrainState, batch: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def surroundings() -> dict[str, Any]:
    """What a reader of the README has already, around a model of one matrix."""
    return {
        "rng": jax.random.key(0),
        "create_state": create_state,
        "loss_fn": loss_fn,
        "batches": [jax.random.normal(jax.random.key(i), (16, 64)) for i in range(2)],
    }


@pytest.mark.parametrize("command", sorted(commands()))
def test_commands_exist(command: str) -> None:
    """In a process of their own: the command line may set up JAX."""
    result = subprocess.run(
        [sys.executable, "-m", "autopar", command, "--help"],
        cwd=checkout.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr


def test_clusters_and_targets_exist() -> None:
    for cluster in re.findall(r"--cluster (\S+)", README):
        assert Cluster.parse(cluster).num_devices > 0
    for file, function in re.findall(r"autopar \w+ (\S+\.py):(\w+)", README):
        source = (checkout.ROOT / file).read_text()
        assert re.search(rf"^(def )?{function}\b", source, re.M)


def test_the_readme_shows_commands() -> None:
    assert commands() >= {"plan", "explain", "audit", "compare", "profile", "demo"}
