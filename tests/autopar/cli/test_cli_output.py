"""Tests that stdout has only the result, and that Ctrl-C ends every command."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from checkout import ROOT

from autopar.cli import main

# A target that prints by every way there is.
LOUD = """
    import atexit, ctypes, os, subprocess, sys

    import jax

    libc = ctypes.CDLL(None)

    def say(where):
        print("python", where)
        os.write(1, f"descriptor {where}\\n".encode())
        libc.puts(f"libc {where}".encode())
        subprocess.run(["echo", f"child {where}"], check=True)

    say("at import")
    atexit.register(print, "at exit")

    def step(w, batch):
        say("at tracing")
        return w - 0.1 * batch.mean(), batch.sum()

    def workload():
        say("at the call")
        x = jax.ShapeDtypeStruct((8, 4), "float32")
        return step, x, x
"""


def write(folder: pathlib.Path, text: str) -> str:
    file = folder / "made_target.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return f"{file}:workload"


def start(*words: object) -> subprocess.Popen[str]:
    path = os.pathsep.join(str(p) for p in (ROOT, ROOT / "solver", ROOT / "passes"))
    return subprocess.Popen(
        [sys.executable, "-m", "autopar", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("own", [True, False], ids=["process", "call"])
def test_json_is_alone_on_stdout(
    own: bool,
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = LOUD if own else LOUD.replace('atexit.register(print, "at exit")', "")
    words = ["plan", write(tmp_path, text), "--cluster", "2:cpu", "--json"]
    if own:
        out, err = start(*words).communicate(timeout=120)
    else:
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit):
            main(words)
        out, err = capfd.readouterr()
        monkeypatch.delitem(sys.modules, "made_target")
    assert json.loads(out)["target"] == words[1]
    for where in ("at import", "at the call", "at tracing"):
        for way in ("python", "descriptor", "libc", "child"):
            assert f"{way} {where}" in err
    assert ("at exit" in err) is own


@pytest.mark.cluster
def test_letters_that_stdout_lacks_are_escaped(tmp_path: pathlib.Path) -> None:
    """Half a pair of UTF-16, which JSON can hold and no encoding has."""
    path = tmp_path / "ledger.jsonl"
    path.write_text(r'{"kind": "wrong", "source": "x", "reason": "\ud800"}' + "\n")
    process = start("ledger", path)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert r"\ud800" in out


# Targets in which an interrupt is not raised at once, or never.
DEAF = {
    "keeps going": """
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        pass
""",
    # As JAX's callback does: what is raised there is lost.
    "collects garbage": """
def lose(*_):
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        pass

gc.callbacks.append(lose)
for _ in range(1000):
    gc.collect()
""",
    # The interrupt is raised again each tenth of a second until it is heard.
    "writes slowly": """
class Slow:
    def __init__(self, file):
        self.file = file
    def __getattr__(self, name):
        return getattr(self.file, name)
    def write(self, text):
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        return self.file.write(text)

sys.stderr = Slow(sys.stderr)
time.sleep(60)
""",
    # Python runs no handler before this returns.
    "is in C": "hashlib.pbkdf2_hmac('sha256', b'a', b'b', 2_000_000_000)",
}


@pytest.mark.parametrize(
    ("how", "as_json"),
    [
        ("keeps going", False),
        ("collects garbage", False),
        ("writes slowly", False),
        ("is in C", True),
    ],
)
@pytest.mark.cluster
def test_ctrl_c_ends_a_command(how: str, as_json: bool, tmp_path: pathlib.Path) -> None:
    body = textwrap.dedent(DEAF[how])
    head = "import gc, hashlib, sys, time\n"
    text = f"{head}print('ready', flush=True)\n{body}\ndef workload(): ...\n"
    words = ["plan", write(tmp_path, text), "--cluster", "2:cpu"]
    process = start(*words, *(["--json"] if as_json else []))
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=120)
    # A second, on a machine that does nothing else; by themselves they take longer.
    assert time.monotonic() - began < 45
    assert process.returncode == 130
    assert err == "autopar: stopped.\n"
    if as_json:
        error = json.loads(out)["error"]
        assert error == {"kind": "Interrupted", "message": "stopped.", "exit_code": 130}
    else:
        assert out == ""


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "import sys\nsys.exit(3)\n",
            ["called sys.exit(3) while it was imported", "__main__", "target.py:2"],
        ),
        ("def workload():\n    quit()\n", ["called sys.exit()", "target.py:2"]),
        (
            "import sys\ndef step(x, y):\n    sys.exit('no')\n"
            "def workload():\n    return step, 1.0, 2.0\n",
            ["called sys.exit('no') while its step was traced", "target.py:3"],
        ),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n",
            ["called sys.exit(2) while it was imported", "target.py:2"],
        ),
    ],
    ids=["import", "call", "trace", "argparse"],
)
@pytest.mark.cluster
def test_a_target_that_calls_exit(
    text: str,
    parts: list[str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = write(tmp_path, text)
    try:
        with pytest.raises(SystemExit) as stop:
            main(["plan", target, "--cluster", "2:cpu"])
    finally:
        sys.modules.pop("made_target", None)
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    for part in parts:
        assert part in err.splitlines()[-1]


def test_help_needs_no_jax() -> None:
    """Help and completion answer at once."""
    code = (
        "import sys\nfrom autopar.cli import main\n"
        "for words in (['--help'], ['plan', '-h'], ['--version']):\n"
        "    try:\n        main(words)\n    except SystemExit as stop:\n"
        "        assert stop.code == 0\n"
        "heavy = {'jax', 'numpy', 'flax', 'highspy', 'pulp', 'msgspec'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    path = os.pathsep.join(str(p) for p in (ROOT, ROOT / "solver", ROOT / "passes"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
