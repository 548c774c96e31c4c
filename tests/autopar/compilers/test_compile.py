"""Tests compiling for devices that this machine does not have."""

import importlib.util
import json

import jax
import pytest
import small_step

import autopar
from autopar.cluster import Cluster
from autopar.cluster.presets import PRESETS
from autopar.compilers import compiled
from autopar.compilers.targets import TARGETS, target_of, topology
from autopar.errors import CompileError, PlanError


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    ("name", "cluster", "text"),
    [
        ("h100", "8:h100", "1x1x8"),
        ("a100", "8x4:a100", "1x8x4"),
        ("b200", "2x4x8:b200", "1x8x8"),
        ("v5e", "4x4:v5e", "v5e:4x4"),
        ("v5e", "64:v5e", "v5e:8x8"),
        ("v5p", "2x2x4:v5p", "v5p:2x2x4"),
    ],
)
def test_clusters_as_topologies(name: str, cluster: str, text: str) -> None:
    assert topology(target_of(name), Cluster.parse(cluster)) == text


@pytest.mark.parametrize(
    ("name", "cluster", "message"),
    [
        ("h100", "4x4:v5e", "h100 is a gpu; plan for --cluster 2x4:h100"),
        ("v5e", "8:h100", "whose devices are gpus, and v5e is a tpu"),
        ("v5e", "3x5:v5e", "no slice of v5e has the shape 3x5"),
    ],
)
def test_clusters_that_are_none_of_the_target(
    name: str, cluster: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        topology(target_of(name), Cluster.parse(cluster))


def test_unknown_targets_list_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"'abacus'.*the targets are .*h100.*v5p"):
        target_of("abacus")


def test_targets_are_presets_of_their_kind() -> None:
    """A preset of that name is what a plan's cluster is made of."""
    for name, target in TARGETS.items():
        assert PRESETS[name].device.kind == target.kind
        if target.gpu is not None:
            bandwidth = PRESETS[name].device.memory_bandwidth_bytes_per_s
            assert 0.85 < bandwidth / target.gpu.memory_bytes_per_s < 1.0


@pytest.mark.parametrize(("name", "extra"), [("a100", "gpu"), ("v5e", "tpu")])
def test_without_the_compiler_the_error_names_the_extra(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    cluster = Cluster.parse("4:a100" if name == "a100" else "2x2:v5e")
    with pytest.raises(PlanError, match=rf"pip install 'autopar\[{extra}-compiler\]'"):
        compiled.check_target(target_of(name), cluster)


class _Lowered:
    """Stands for a lowered step whose module every compiler refuses."""

    operation = property(lambda self: self)

    def compiler_ir(self) -> "_Lowered":
        return self

    def write_bytecode(self, file: object) -> None:
        file.write(b"no module")  # type: ignore[attr-defined]


def test_what_the_compiler_says_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "check_target", lambda *_: None)
    with pytest.raises(CompileError, match="XLA's compiler for h100 refuses the step"):
        compiled.compile_for([_Lowered()], target_of("h100"), Cluster.parse("8:h100"))


@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_a_small_step(name: str) -> None:
    target = target_of(name)
    if not has(target.module):
        pytest.skip(f"needs the extra {target.extra}")
    cluster = "8:h100" if name == "h100" else "2x4:v5e"
    found = autopar.audit(
        small_step.step,
        *small_step.structs(),
        plan=small_step.plan(cluster),
        target=name,
    )
    assert found.target is not None
    held = found.target.memory
    assert held.argument_bytes > 0
    assert held.peak_bytes >= held.argument_bytes
    assert jax.default_backend() == "cpu"
    data = json.loads(json.dumps(found.to_json()))["target"]
    assert data["name"] == name
    assert data["memory"]["peak_bytes"] == held.peak_bytes
    assert f"  {name}" in str(found)


@pytest.mark.parametrize("given", ["", "--xla_gpu_memory_limit_slop_factor=80"])
def test_the_compiler_is_told_the_memory_that_a_plan_may_use(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run tells it; a factor that the user gives stays."""
    monkeypatch.setenv("XLA_FLAGS", given)
    cluster = Cluster.parse("8:h100,memory=8GB")
    flags = compiled._environment(target_of("h100"), cluster, {})["XLA_FLAGS"].split()
    (found,) = [f for f in flags if "slop_factor" in f]
    assert found == (given or "--xla_gpu_memory_limit_slop_factor=9")
