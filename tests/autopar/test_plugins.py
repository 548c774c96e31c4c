"""Tests parts that other packages add: devices, codecs, policies and launchers."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from importlib import metadata

import pytest
from checkout import ROOT

from autopar.cluster.presets import PRESETS, read_presets
from autopar.cluster.specs import ClusterError

PACKAGE = """
import dataclasses
from typing import ClassVar
from autopar.compression.codecs.registry import register_codec
from autopar.compression.codecs.quantise import Bf16
from autopar.elastic.processes.launching import LocalLauncher, python_command
from autopar.scheduler.policies.baselines import Fifo

@register_codec
@dataclasses.dataclass(frozen=True)
class Toy(Bf16):
    name: ClassVar[str] = "toy"

class Last(Fifo):
    name = "last"

def launcher(script, processes):
    print("the toy launcher starts", processes, flush=True)
    return LocalLauncher(python_command(script))
"""
ENTRY_POINTS = """
[autopar.codecs]
toy = toy_parts:Toy
[autopar.scheduling_policies]
last = toy_parts:Last
[autopar.launchers]
mine = toy_parts:launcher
"""
DEVICE = """
kind = "gpu"
tera_flops = { float32 = 50, bfloat16 = 400 }
vector_tera_flops = 25
memory_bytes = 64e9
memory_gb_per_s = 1600
efficiency = 0.8
sustained = 0.7
rates = ""
power_w = 350
network_gbit_per_s = 200
[inner]
gb_per_s = 200
latency_s = 2e-6
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder in which a package with all kinds of parts is installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "toy_parts.py").write_text(PACKAGE)
    info = folder / "toy_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy-parts\nVersion: 1.0"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "toyard.toml").write_text(DEVICE)
    return folder


def ran(installed: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the package installed."""
    places = (installed, ROOT, ROOT / "solver", ROOT / "passes")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "AUTOPAR_DEVICES": str(installed),
    }
    return subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=120
    )


def test_a_device(installed: pathlib.Path) -> None:
    code = "import autopar; print(autopar.Cluster.parse('2x4:toyard').device.name)"
    assert ran(installed, "-c", code).stdout == "toyard\n"


def test_a_codec_and_a_policy(
    installed: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from autopar.compression.codecs.registry import parse_codec\n"
        "from autopar.scheduler.policies.baselines import policy_of\n"
        "print(parse_codec('toy').name, policy_of('last').name)\n"
        "try: policy_of('first')\n"
        "except Exception as error: print(error)"
    )
    lines = ran(installed, "-c", code).stdout.splitlines()
    assert lines[0] == "toy last"
    assert lines[1].endswith("goodput, last.")


def test_a_launcher(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('trained')")
    words = [
        "-m",
        "autopar",
        "run",
        "--processes",
        "1",
        "--folder",
        str(tmp_path / "f"),
    ]
    done = ran(installed, *words, "--backend", "mine", str(script))
    assert "the toy launcher starts 1" in done.stdout
    assert "trained" in done.stdout
    done = ran(installed, *words, "--backend", "yours", str(script))
    assert done.returncode == 2
    assert "local, ray, mine" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            DEVICE.replace("0.8", "'x'"),
            r"Expected `float`, got `str`.*efficiency",
        ),
        (DEVICE + "more = 1", "unknown field `more`"),
        (DEVICE.replace("gpu", "abacus"), "abacus"),
        (DEVICE.replace("64e9", "-1"), "memory"),
        ("kind =", "Invalid value"),
    ],
)
def test_a_wrong_device(tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(ClusterError, match=f"(?s)wrong.toml.*{message}"):
        read_presets(tmp_path)


def test_two_devices_of_one_name(tmp_path: pathlib.Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.toml").write_text(DEVICE)
    with pytest.raises(ClusterError, match="there is a device 'x' already"):
        read_presets(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ClusterError, match="AUTOPAR_DEVICES"):
        read_presets(tmp_path / "none")


def test_our_own_devices_have_no_entry_points() -> None:
    assert "h100" in PRESETS
    assert not metadata.entry_points(group="autopar.devices")
