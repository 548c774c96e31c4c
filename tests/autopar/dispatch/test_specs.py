"""Tables of jobs: what is read, and errors that name the job and the key."""

from __future__ import annotations

import pathlib

import pytest
from dispatching import HALVES

from autopar.dispatch.specs import read_jobs
from autopar.errors import ScheduleError

ONE = '[[job]]\nname = "one"\nscript = "train.py"\n'


def written(folder: pathlib.Path, text: str) -> pathlib.Path:
    (folder / "train.py").write_text("")
    HALVES.save(folder / "curve.json")
    path = folder / "jobs.toml"
    path.write_text(text)
    return path


def test_a_table_is_read(tmp_path: pathlib.Path) -> None:
    more = 'args = ["--rate", "0.1"]\ndevices = 2\nmax = 4\ncurve = "curve.json"\n'
    two = '[[job]]\nname = "two"\nscript = "train.py"\napplication = "gpt"\n'
    first, second = read_jobs(written(tmp_path, ONE + more + two))
    assert (first.spec.args, first.spec.devices) == (("--rate", "0.1"), 2)
    assert (first.curve, first.application) == (HALVES, "train.py")
    assert (second.curve, second.application) == (None, "gpt")
    assert first.folder == str(tmp_path)
    assert [job.most(("cpu",)) for job in (first, second)] == [4, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ONE + "devcies = 2", r"job 'one': .*devcies"),
        (ONE + 'devices = "2"', r"job 'one': .*got `str`, key 'devices'"),
        (ONE + "devices = 0", "job 'one': devices is 0, below min"),
        (ONE + "min = 0", "job 'one': min is 0"),
        (ONE + "devices = 4\nmax = 2", "job 'one': max is 2, below devices = 4"),
        (ONE + "submitted_s = -1", "job 'one': submitted_s is -1"),
        (ONE + "submitted_s = nan", "job 'one': submitted_s is nan"),
        (ONE + 'curve = "none.json"', r"job 'one': curve: .*none.json: No such file"),
        (ONE + 'curve = "train.py"', "job 'one': curve: .*is no goodput curve"),
        (ONE + 'curve = "a"\ntarget = "b"', "job 'one': curve and target are both"),
        (ONE + "noise_scale = 3.0", "job 'one': target_args and noise_scale belong"),
        (ONE + "save_every = 0", "job 'one': save_every is 0"),
        (ONE + ONE, "job 'one' stands there twice"),
        ('[[job]]\nscript = "train.py"', "job 1: .*missing.*`name`"),
        ('[[job]]\nname = "../x"\nscript = "train.py"', r"name '\.\./x' is no name"),
        ('[[job]]\nname = "x"\nscript = "no.py"', "job 'x': script 'no.py': there is"),
        ("[[jobs]]\n", "key 'jobs' is not known"),
        ("", "it has no jobs"),
        ("[[job", "it is no TOML"),
        (ONE + f"devices = {'9' * 5000}", "it is no TOML"),
        (ONE.replace("train", "x" * 300), "job 'one': script 'x+': there is no"),
        (ONE + 'curve = "\\u0000"', "job 'one': curve: .*null"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ScheduleError, match=words):
        read_jobs(written(tmp_path, text))


def test_a_table_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ScheduleError, match="No such file"):
        read_jobs(tmp_path / "jobs.toml")
