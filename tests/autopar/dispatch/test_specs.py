"""Tests tables of jobs: their content, and errors that name the job and the key."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from dispatching import HALVES

from autopar.dispatch.specs import read_jobs, read_users
from autopar.errors import ScheduleError
from autopar.scheduler.users import UserLimits

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
        (ONE + "steps = -1", "job 'one': steps is -1"),
        (ONE + ONE, "job 'one' stands there twice"),
        ('[[job]]\nscript = "train.py"', "job 1: .*missing.*`name`"),
        ('[[job]]\nname = "../x"\nscript = "train.py"', r"name '\.\./x' is no name"),
        ('[[job]]\nname = "x"\nscript = "no.py"', "job 'x': script 'no.py': there is"),
        ("[[jobs]]\n", "key 'jobs' is not known"),
        (ONE + "priority = 0", "job 'one': priority is 0"),
        (ONE + "priority = nan", "job 'one': priority is nan"),
        (ONE + f'user = "{"x" * 65}"', "job 'one': user has 65 letters"),
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


def test_users_of_a_table(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """A job is of who hands it in, unless the table says otherwise."""
    monkeypatch.setenv("LOGNAME", "carla")
    more = ONE.replace("one", "two") + 'user = "anna"\npriority = 2.0\n'
    path = written(tmp_path, ONE + more + "[users.anna]\ndevices = 8\nshare = 2.0\n")
    first, second = read_jobs(path)
    assert (first.user, second.user, second.spec.priority) == ("carla", "anna", 2.0)
    assert read_users(path) == {"anna": UserLimits(devices=8, share=2.0)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[users.anna]\ndevces = 8", "user 'anna': 'devces' is not known"),
        ("[users.anna]\ndevices = -1", "user 'anna': a quota is -1"),
        ("[users.anna]\nshare = 0", "user 'anna': a share is 0"),
        ('[users.anna]\nshare = "2"', "user 'anna': Expected `float`"),
        ("[users]\nanna = 8", "user 'anna'"),
        ("users = 8", "users is no table"),
    ],
)
def test_what_is_wrong_of_a_user_is_named(
    text: str, words: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ScheduleError, match=words):
        read_users(written(tmp_path, text))
