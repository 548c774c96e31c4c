"""Reads and checks jobs from a TOML file that has a table ``[[job]]`` for each job."""

from __future__ import annotations

import collections
import getpass
import math
import os
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from autopar.errors import ScheduleError
from autopar.goodput.curves import CurveTable
from autopar.scheduler.jobs import wrong_priority
from autopar.scheduler.users import UserLimits

_LONGEST_USER = 64
# What a job's name may look like. The name is also the name of the job's folder.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as its owner submits it.

    Attributes:
      name: name of the job, different for each job of a table.
      script: path of a training script that calls `autopar.elastic`, relative to the
        folder of the TOML file.
      args: arguments of the script.
      application: name of the training program. Measurements of a job are used for
        other jobs of the same program. Default: the script's name.
      submitted_s: seconds from the submission of the file to the job's earliest start.
        The job's waiting time counts from its earliest start.
      devices: the number of devices that the owner asks for.
      min: the smallest number of devices that the job can use.
      max: the largest number of devices that the job can use; 0: the largest number in
        its curve, or ``devices`` if it has no curve.
      curve: path of a goodput curve that `autopar goodput --out` wrote.
      target: in place of ``curve``, what to plan to get the curve, such as
        ``train.py:workload``.
      target_args: arguments of the target's function, ``key=value``.
      noise_scale: noise scale of the gradients in rows, for the planned curve; None if
        it is not known.
      max_batch: largest batch size, for the planned curve.
      guaranteed: whether the job is promised at least the speed that it has on
        ``devices`` devices.
      user: the user to whose quota the job counts; '': the user who submits it.
      priority: weight of the job among the jobs of its user.
      steps: number of steps of the base batch that the script runs; 0: not known. A
        policy may serve jobs first that have little work left.
      save_every: number of steps between checkpoints, if the script does not set it.
      ahead: whether the run plans and compiles for likely next numbers of devices, in a
        background process.
    """

    name: str
    script: str
    args: tuple[str, ...] = ()
    application: str = ""
    submitted_s: float = 0.0
    devices: int = 1
    min: int = 1
    max: int = 0
    curve: str = ""
    target: str = ""
    target_args: tuple[str, ...] = ()
    noise_scale: float | None = None
    max_batch: int | None = None
    guaranteed: bool = False
    user: str = ""
    priority: float = 1.0
    steps: int = 0
    save_every: int = 100
    ahead: bool = False


class Handed(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted job with its goodput curve, as a scheduler stores it.

    Attributes:
      spec: the job as submitted.
      folder: the folder in which its script runs.
      curve: the job's goodput on each configuration of devices; None if it is not
        known.
      owner: the login name of the user who submitted the job; '' if it is not known.
    """

    spec: JobSpec
    folder: str
    curve: CurveTable | None = None
    owner: str = ""

    @property
    def user(self) -> str:
        """The user to whose quota and share the job counts."""
        return self.spec.user or self.owner

    @property
    def application(self) -> str:
        """The training program of the job."""
        return self.spec.application or pathlib.PurePath(self.spec.script).name

    def most(self, kinds: tuple[str, ...], curve: CurveTable | None = None) -> int:
        """The largest number of devices that the job can use, on a cluster with these
        kinds.

        Args:
          kinds: kinds of the cluster's devices.
          curve: the goodput curve, corrected by measurements; None: the submitted
            curve.
        """
        curve = curve or self.curve
        if self.spec.max:
            return self.spec.max
        if curve is None:
            return self.spec.devices
        return max((curve.on(kind).most for kind in kinds), default=0)


def read_jobs(path: pathlib.Path) -> tuple[Handed, ...]:
    """Reads the jobs in a TOML file, and their goodput curves.

    Raises:
      ScheduleError: the file cannot be read, or a job is wrong. The error names the job
        and the key.
    """
    folder = path.resolve().parent
    return tuple(check(spec, folder, where) for where, spec in read_specs(path))


def read_specs(path: pathlib.Path) -> list[tuple[str, JobSpec]]:
    """Reads the jobs in a TOML file, each with its place in the file; does not read
    curves.

    Raises:
      ScheduleError: the file cannot be read, or a job is wrong.
    """
    found = _read_toml(path)
    found.pop("users", None)
    tables = found.pop("job", None)
    if found:
        raise ScheduleError(
            f"{path}: key {next(iter(found))!r} is not known; write a table [[job]] "
            "for each job, and a table [users.NAME] for a user."
        )
    if not isinstance(tables, list) or not tables:
        raise ScheduleError(f"{path}: it has no jobs; write a table [[job]] for each.")
    jobs = [_read(path, k, table) for k, table in enumerate(tables, 1)]
    counted = collections.Counter(spec.name for _, spec in jobs)
    for name, times in counted.items():
        if times > 1:
            raise ScheduleError(f"{path}: job {name!r} stands there twice; rename one.")
    return jobs


def read_users(path: pathlib.Path) -> dict[str, UserLimits]:
    """Reads quotas and shares of users from the tables ``[users.NAME]`` of a file.

    Raises:
      ScheduleError: the file cannot be read, or a user is wrong.
    """
    tables = _read_toml(path).get("users", {})
    if not isinstance(tables, dict):
        raise ScheduleError(f"{path}: users is no table; write [users.NAME].")
    found: dict[str, UserLimits] = {}
    for user, table in tables.items():
        where = f"{path}: user {user!r}"
        unknown = set(table) - {"devices", "share"} if isinstance(table, dict) else {""}
        if unknown:
            raise ScheduleError(
                f"{where}: {min(unknown)!r} is not known; give devices and share."
            )
        try:
            found[user] = msgspec.convert(table, UserLimits)
        except (msgspec.ValidationError, ScheduleError) as error:
            raise ScheduleError(f"{where}: {str(error).rstrip('.')}.") from error
    return found


def _read_toml(path: pathlib.Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ScheduleError(f"{path}: {error.strerror}.") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOML, UTF-8, huge numbers
        raise ScheduleError(f"{path}: it is no TOML: {error}.") from error


def _read(path: pathlib.Path, number: int, table: Any) -> tuple[str, JobSpec]:
    named = isinstance(table, Mapping) and isinstance(table.get("name"), str)
    where = f"{path}: job {table['name']!r}" if named else f"{path}: job {number}"
    try:
        return where, msgspec.convert(table, JobSpec)
    except msgspec.ValidationError as error:
        raise ScheduleError(f"{where}: {_plain(error)}.") from error


def login_name() -> str:
    """The login name of this process's user; the user id if there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def check(
    spec: JobSpec, folder: pathlib.Path, where: str, owner: str | None = None
) -> Handed:
    """Checks a job and reads its curve.

    Args:
      spec: the job as submitted.
      folder: the folder in which its script runs.
      where: the job's place in the file, for error messages.
      owner: the user who submits the job; None: the user of this process.

    Raises:
      ScheduleError: a value of the job is wrong.
    """
    wrong = _wrong(spec, folder)
    if wrong:
        raise ScheduleError(f"{where}: {wrong}")
    curve = None
    if spec.curve:
        try:
            curve = CurveTable.load(folder / spec.curve)
        except ScheduleError as error:
            raise ScheduleError(f"{where}: curve: {error}") from error
    owner = login_name() if owner is None else owner
    return Handed(spec=spec, folder=str(folder), curve=curve, owner=owner)


def _plain(error: msgspec.ValidationError) -> str:
    """The text of a msgspec error, with keys as they are written in the file."""
    return re.sub(r" - at `\$\.?([^`]*)`", r", key '\1'", str(error))


def _wrong(spec: JobSpec, folder: pathlib.Path) -> str:
    """What is wrong with a job: the key, its value and what to do; '' if nothing is."""
    if not _NAME.fullmatch(spec.name):
        return f"name {spec.name!r} is no name; use letters, digits and _ . -"
    try:
        there = (folder / spec.script).is_file()
    except OSError:  # not a valid name of a file
        there = False
    if not there:
        return f"script {spec.script[:200]!r}: there is no such file in {folder}."
    if not (math.isfinite(spec.submitted_s) and spec.submitted_s >= 0):
        return f"submitted_s is {spec.submitted_s}; give a time of at least 0."
    if spec.min < 1:
        return f"min is {spec.min}; give at least 1."
    if spec.devices < spec.min:
        return f"devices is {spec.devices}, below min = {spec.min}."
    if spec.max and spec.max < spec.devices:
        return f"max is {spec.max}, below devices = {spec.devices}."
    if spec.curve and spec.target:
        return "curve and target are both given; give one."
    if not spec.target and (spec.target_args or spec.noise_scale is not None):
        return "target_args and noise_scale belong to target, which is missing."
    if (spec.noise_scale is None) != (spec.max_batch is None):
        return "noise_scale and max_batch go together; give both or none."
    if len(spec.user) > _LONGEST_USER:
        return f"user has {len(spec.user)} letters; give at most {_LONGEST_USER}."
    if wrong := wrong_priority(spec.priority):
        return wrong
    if spec.steps < 0:
        return f"steps is {spec.steps}; give the number of steps, or 0."
    if spec.save_every < 1:
        return f"save_every is {spec.save_every}; give at least 1 step."
    return ""


def obstacle(job: Handed, devices: int, kinds: tuple[str, ...], *, adapts: bool) -> str:
    """Why a job cannot run on the present cluster; '' if it can.

    Args:
      job: the job.
      devices: number of devices of the cluster.
      kinds: kinds of these devices.
      adapts: whether the policy may give a job another number of devices than its owner
        asks for.
    """
    least = job.spec.min if adapts else job.spec.devices
    if least > devices:
        return (
            f"it needs {least} devices and the cluster has {devices}: it waits for "
            "nodes that join"
        )
    if job.curve is not None and not job.most(kinds):
        return (
            f"by its curve it runs on {', '.join(job.curve.kinds) or 'nothing'} and "
            f"the cluster has {', '.join(kinds)}: it waits for such nodes"
        )
    return ""
