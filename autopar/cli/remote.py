"""The work of ``autopar jobs``; with ``--at`` a remote scheduler does it.

The remote scheduler runs a command as if it were called on the scheduler's own machine,
and returns the text to print.
"""

from __future__ import annotations

import pathlib
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from autopar.cli import owning
from autopar.cli.commands.clusters import (
    JobCommand,
    ListCommand,
    LogsCommand,
    RemoteOptions,
    SubmitCommand,
    WishOptions,
)
from autopar.cli.output import Result
from autopar.dispatch.endpoint import Answer, Endpoint, ServeHost, ask
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
      wish: for ``wish``: ``hold`` or ``cancel`` the jobs, or release them ('').
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


# The first conversion runs at import, because msgspec crashes if two threads inspect
# the same type for the first time at once.
_FIRST = msgspec.convert({"command": "jobs"}, Question)


_NO_ANSWER = "; see whether `autopar schedule --listen` runs there."


def _ask(asked: RemoteOptions, advice: str = _NO_ANSWER, **words: Any) -> Result:
    """Runs a command at the scheduler that ``--at`` names, and returns its result.

    Raises:
      ScheduleError: the address is not ``HOST:PORT``, or the scheduler refuses the
        command, or does not answer.
      PlanError: there is no secret.
    """
    for one in asked.at.split(","):
        _split("--at", one)
    network = Network(secret=read_secret(asked.secret))
    try:
        found = ask(network, asked.at, **words)
    except OSError as error:
        raise ScheduleError(f"{asked.at} does not answer: {error}{advice}") from error
    return Result(str(found["text"]), int(found["code"]))


def jobs(asked: ListCommand) -> Result:
    """Lists the jobs of a scheduler."""
    decisions, as_json = asked.decisions, asked.as_json
    if asked.at:
        return _ask(asked, command="jobs", decisions=decisions, as_json=as_json)
    return owning.jobs(asked.folder, decisions=decisions, as_json=as_json)


def submit(asked: SubmitCommand) -> Result:
    """Submits jobs; a second call with the same ``submission`` adds no jobs.

    Raises:
      ScheduleError: a job is wrong, or the scheduler does not answer.
    """
    if asked.submission and not asked.at:
        raise ScheduleError("--id is of a submission elsewhere: add --at HOST:PORT.")
    specs, folder = owning.read_submitted(asked)
    if not asked.at:
        return owning.take_jobs(asked.state, specs, folder)
    submission = asked.submission or uuid.uuid4().hex
    return _ask(
        asked,
        ". Nobody knows whether the jobs were taken: give the same command again with "
        f"--id {submission}; what was taken is not taken twice.",
        command="submit",
        submission=submission,
        owner=login_name(),
        folder=str(folder),
        where=str(asked.file),
        jobs=[msgspec.to_builtins(spec) for _, spec in specs],
    )


def wish(asked: WishOptions) -> Result:
    """Cancels, holds or releases jobs."""
    if asked.at:
        return _ask(asked, command="wish", names=asked.names, wish=asked.wish)
    return owning.wish(asked.state, asked.names, asked.wish)


def logs(asked: LogsCommand) -> Result:
    """Prints what a job printed."""
    if asked.at and asked.follow:
        raise ScheduleError("--follow works beside the scheduler: leave out --at.")
    if asked.at:
        return _ask(asked, command="logs", names=[asked.name], lines=asked.lines)
    return owning.logs(asked.state, asked.name, asked.lines, follow=asked.follow)


def show(asked: JobCommand) -> Result:
    """Shows everything about a job."""
    if asked.at:
        names, as_json = [asked.name], asked.as_json
        return _ask(asked, command="show", names=names, as_json=as_json)
    return owning.show(asked.state, asked.name, as_json=asked.as_json)


def listen(
    state: pathlib.Path,
    address: str,
    secret: str,
    serve_host: ServeHost | None = None,
) -> Endpoint:
    """Starts to answer commands for the state of a scheduler.

    Args:
      state: the scheduler's folder.
      address: ``HOST:PORT`` to listen at.
      secret: the secret, as text.
      serve_host: serves the agents of hosts; None: they are refused.

    Raises:
      ScheduleError: the address is not ``HOST:PORT``, or this process cannot listen
        there.
    """
    host, port = _split("--listen", address)
    return Endpoint(Network(host, secret), port, answer_for(state), serve_host)


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
