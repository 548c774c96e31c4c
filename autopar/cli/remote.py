"""Sends the commands ``autopar jobs ... --at HOST:PORT`` to a remote scheduler.

The scheduler runs a command as if it were called on the scheduler's own machine, and
returns the text to print.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from autopar.cli import owning
from autopar.cli.output import Result
from autopar.dispatch.endpoint import Answer, Endpoint, ask
from autopar.dispatch.specs import JobSpec, login_name
from autopar.elastic.processes.members import Message
from autopar.elastic.processes.network import Network, read_secret, split_address
from autopar.errors import InputError, ScheduleError

# The most characters in the name of a submission.
_LONGEST_ID = 100


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A command for a remote scheduler, with its arguments.

    Attributes:
      command: the command.
      names: the names of jobs.
      wish: for ``wish``: ``hold`` or ``cancel`` the jobs, or '' to release them.
      decisions: for ``jobs``: whether to show decisions.
      as_json: for ``jobs`` and ``show``: whether the answer is one JSON object.
      lines: for ``logs``: the number of lines.
      submission: for ``submit``: the name of the submission. The scheduler accepts each
        name once.
      owner: for ``submit``: the login name of the user who submits the jobs.
      folder: for ``submit``: the absolute path of the jobs' folder.
      where: for ``submit``: the submitted file, for error messages.
      jobs: for ``submit``: the jobs.
    """

    command: Literal["jobs", "show", "logs", "wish", "submit"]
    names: tuple[str, ...] = ()
    wish: Literal["hold", "cancel", ""] = ""
    decisions: bool = False
    as_json: bool = False
    lines: int = 100
    submission: str = ""
    owner: str = ""
    folder: str = ""
    where: str = ""
    jobs: tuple[JobSpec, ...] = ()


# This conversion runs at import, because msgspec crashes if two threads inspect the
# same type for the first time at once.
_FIRST = msgspec.convert({"command": "jobs"}, Question)


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerAt:
    """A remote scheduler that listens for commands.

    Attributes:
      address: ``HOST:PORT``.
      network: the network settings, with the secret.
    """

    address: str
    network: Network

    @classmethod
    def of(cls, address: str, secret: pathlib.Path | None) -> SchedulerAt:
        """Returns the scheduler that ``--at`` and ``--secret`` name.

        Raises:
          ScheduleError: the address is not ``HOST:PORT``.
          PlanError: there is no secret.
        """
        _split("--at", address)
        return cls(address, Network(secret=read_secret(secret)))

    def run(self, command: str, **words: Any) -> Result:
        """Runs a command at the scheduler, and returns its result.

        Raises:
          ScheduleError: the scheduler refuses the command, or does not answer.
        """
        try:
            found = ask(self.network, self.address, command=command, **words)
        except OSError as error:
            raise ScheduleError(
                f"{self.address} does not answer: {error}; see whether `autopar "
                "schedule --listen` runs there."
            ) from error
        return Result(str(found["text"]), int(found["code"]))

    def submit(self, asked: owning.Submitted) -> Result:
        """Submits jobs; a second call with the same ``asked.submission`` adds no jobs.

        Raises:
          ScheduleError: a job is wrong, or the scheduler does not answer.
        """
        specs, folder = owning.read_submitted(asked)
        try:
            found = ask(
                self.network,
                self.address,
                command="submit",
                submission=asked.submission,
                owner=login_name(),
                folder=str(folder),
                where=str(asked.file),
                jobs=[msgspec.to_builtins(spec) for _, spec in specs],
            )
        except OSError as error:
            raise ScheduleError(
                f"{self.address} does not answer: {error}. Nobody knows whether the "
                "jobs were taken: give the same command again with --id "
                f"{asked.submission}; what was taken is not taken twice."
            ) from error
        return Result(str(found["text"]), int(found["code"]))


def listen(state: pathlib.Path, address: str, secret: str) -> Endpoint:
    """Starts to answer commands for the state of a scheduler.

    Args:
      state: the scheduler's folder.
      address: ``HOST:PORT`` to listen at.
      secret: the secret, as text.

    Raises:
      ScheduleError: the address is not ``HOST:PORT``, or this process cannot listen
        there.
    """
    host, port = _split("--listen", address)
    return Endpoint(Network(host, secret), port, answer_for(state))


def answer_for(state: pathlib.Path) -> Answer:
    """Returns a function that runs the command of a message on a scheduler's state."""

    def answer(message: Message) -> dict[str, Any]:
        words = {k: v for k, v in message.items() if k not in ("kind", "protocol")}
        try:
            asked = msgspec.convert(words, Question)
        except msgspec.ValidationError as error:
            raise ScheduleError(f"the question is wrong: {error}.") from error
        found = _carry_out(state, asked)
        return {"text": found.text, "code": found.code}

    return answer


def _carry_out(state: pathlib.Path, asked: Question) -> Result:
    if asked.command == "submit":
        return _take(state, asked)
    if asked.command == "jobs":
        return owning.jobs(state, decisions=asked.decisions, as_json=asked.as_json)
    if asked.command == "wish":
        return owning.wish(state, asked.names, asked.wish)
    name = _only(asked.names)
    if asked.command == "show":
        return owning.show(state, name, as_json=asked.as_json)
    return owning.logs(state, name, max(asked.lines, 1), follow=False)


def _only(names: Sequence[str]) -> str:
    if len(names) != 1:
        raise ScheduleError(f"name one job, and not {len(names)}.")
    return names[0]


def _take(state: pathlib.Path, asked: Question) -> Result:
    folder = pathlib.Path(asked.folder)
    if not folder.is_absolute():
        raise ScheduleError(f"folder {asked.folder!r} is no absolute path.")
    if not 1 <= len(asked.submission) <= _LONGEST_ID:
        raise ScheduleError(
            f"a submission has a name of 1 to {_LONGEST_ID} letters: give another --id."
        )
    specs = [(f"{asked.where}: job {spec.name!r}", spec) for spec in asked.jobs]
    return owning.take_jobs(
        state, specs, folder, owner=asked.owner, submission=asked.submission
    )


def _split(option: str, address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except InputError as error:
        raise ScheduleError(f"{option}: {error}.") from error
