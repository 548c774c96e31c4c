"""Tests the batch script of a Slurm job, and wrong options."""

from __future__ import annotations

import pathlib
import subprocess
from typing import Any

import pytest
from command_line import Run, assert_fails
from golden import assert_golden

from autopar.errors import InputError
from autopar.launching import slurm
from autopar.launching.slurm import SlurmJob, job_script

NASTY = [
    "a b",
    "$(touch x)",
    "`touch x`",
    "'; touch x #",
    '"',
    "\\",
    "*",
    "-",
    "\n",
    "",
]


def job(**given: Any) -> SlurmJob:
    defaults: dict[str, Any] = {
        "script": ("train.py", "--rate", "0.1"),
        "nodes": (2, 8),
        "place": pathlib.Path("/data"),
    }
    return SlurmJob(**defaults | given)


def directives(script: str) -> list[str]:
    lines = script.splitlines()
    return [x.removeprefix("#SBATCH ") for x in lines if x.startswith("#SBATCH")]


def settings(script: str, *names: str) -> list[str]:
    """The values of variables and arrays at the head of a script, read by bash."""
    head = script[: script.index("\nsay()")]
    shown = "".join(f'\nprintf "%s\\0" "${{{name}[@]}}"' for name in names)
    done = subprocess.run(
        ["bash", "-c", head + shown], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_slurm_is_asked_for_what_an_elastic_run_needs() -> None:
    found = directives(job_script(job(time="4:00:00", sbatch=("-p gpu", "--mem=0"))))
    assert found == [
        "--job-name=train",
        "--nodes=2-8",
        "--time=4:00:00",
        "--signal=B:USR1@120",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        "-p gpu",
        "--mem=0",
    ]


def test_without_a_limit_that_of_the_partition_holds() -> None:
    assert not any("--time" in x for x in directives(job_script(job())))


def test_the_script_is_the_golden_one() -> None:
    made = job(time="4:00:00", slots=2, run=("--devices=4",), command=("autopar",))
    assert_golden(job_script(made), "slurm_job.sh")
    subprocess.run(["bash", "-n"], input=job_script(made), text=True, check=True)


@pytest.mark.parametrize("word", NASTY)
def test_words_reach_the_script_as_they_are(word: str, tmp_path: pathlib.Path) -> None:
    made = job(
        script=("train.py", word),
        place=tmp_path / "a 'b'",
        folder=pathlib.Path("$(touch x)"),
    )
    found = settings(job_script(made), "script", "place", "folder")
    assert found == ["train.py", word, str(made.place), "$(touch x)"]
    subprocess.run(["bash", "-n"], input=job_script(made), text=True, check=True)


def test_options_of_the_run_are_words() -> None:
    made = job(run=("--devices=4", "--cluster 'a b'"))
    found = settings(job_script(made), "run", "slots", "least", "most")
    assert found == ["--devices=4", "--cluster", "a b", "1", "2", "8"]


def test_a_name_of_the_script_is_no_option() -> None:
    found = directives(job_script(job(script=("my $(x) --array=1.py",))))
    assert found[0] == "--job-name=my_x_--array_1"


@pytest.mark.parametrize(
    ("text", "expected"), [("2-8", (2, 8)), ("4", (4, 4)), ("1-1", (1, 1))]
)
def test_nodes_are_a_range(text: str, expected: tuple[int, int]) -> None:
    assert slurm.read_nodes(text) == expected


@pytest.mark.parametrize("text", ["8-2", "0", "", "2-", "a", "2-8\n", "1k", "2,8"])
def test_other_nodes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--nodes 2-8"):
        slurm.read_nodes(text)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 90.5),
        ("2:00:00", 120),
        ("1-2", 26 * 60),
        ("1-02:30", 26 * 60 + 30),
        ("1-02:30:30", 26 * 60 + 30.5),
    ],
)
def test_times_are_those_of_slurm(text: str, minutes: float) -> None:
    assert slurm.seconds_of(text) == 60 * minutes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"time": "4h"}, "such as --time 4:00:00"),
        ({"time": "5", "signal_s": 240}, "a smaller --grace-signal"),
        ({"sbatch": ("partition=gpu",)}, "such as --partition=gpu"),
        ({"sbatch": ("",)}, "such as --partition=gpu"),
        ({"sbatch": ("--comment='x",)}, "No closing quotation"),
        ({"sbatch": ("--mem=0\nrm -r x",)}, "such as --partition=gpu"),
        ({"sbatch": ("-N4",)}, "use --nodes"),
        ({"sbatch": ("--mem=0 --nodes=4",)}, "use --nodes"),
        ({"sbatch": ("--ntasks-per-node 4",)}, "use --slots"),
        ({"sbatch": ("--array=0-3",)}, "share the run's folder"),
        ({"sbatch": ("--no-requeue",)}, "needs it as it is"),
        ({"run": ("devices=4",)}, "such as --devices=4"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        job(**given)


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return "train.py"


def test_the_command_prints_the_script(run: Run, script: str) -> None:
    words = ("--nodes", "2-8", "--sbatch", "--partition=gpu", script, "--nodes", "3")
    found = run("launch", "slurm", *words)
    assert found.code == 0
    assert found.out.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    assert "--partition=gpu" in directives(found.out)
    assert settings(found.out, "script") == ["train.py", "--nodes", "3"]


def test_the_command_writes_the_script(run: Run, script: str) -> None:
    written = run("launch", "slurm", "--nodes", 2, "--out", "job.sh", script)
    assert written.code == 0
    assert "`sbatch job.sh`" in written.out
    assert pathlib.Path("job.sh").read_text().startswith("#!/bin/bash\n")
    failed = run("launch", "slurm", "--nodes", 2, "--out", "no/job.sh", script)
    assert_fails(failed, "no/job.sh", "--out")


def test_a_script_has_to_be_there(run: Run) -> None:
    assert_fails(run("launch", "slurm", "--nodes", 2, "none.py"), "none.py")


def test_the_command_submits_the_script(
    run: Run, script: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\n/bin/cat > given; echo "Submitted batch job 7"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = run("launch", "slurm", "--nodes", 2, "--submit", script)
    assert (found.code, found.out) == (0, "Submitted batch job 7\n")
    assert "--nodes=2-2" in directives((tmp_path / "given").read_text())

    sbatch.write_text("#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    failed = run("launch", "slurm", "--nodes", 2, "--submit", script)
    assert_fails(failed, "invalid partition")
    sbatch.unlink()
    failed = run("launch", "slurm", "--nodes", 2, "--submit", script)
    assert_fails(failed, "no sbatch on this machine")
