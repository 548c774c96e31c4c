"""Judges the output and the files of the programs that `cases.py` runs.

Each judge takes the output and the exit code. It returns a line about the result, or
raises `Wrong`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import autopar

# Largest allowed difference from `jax.jit`, relative to an array's largest element.
LIMIT = 2e-3


class Wrong(Exception):
    """A case has not the expected result; the message says why."""


def need(good: object, text: str) -> None:
    """Raises `Wrong` with this text if a condition is false."""
    if not good:
        raise Wrong(" ".join(text.split())[:400])


def own_error(name: str) -> bool:
    """Whether autopar defines the error class of this name."""
    kind = getattr(autopar, name.rsplit(".", 1)[-1], None)
    return isinstance(kind, type) and issubclass(kind, autopar.AutoparError)


def same_as_jit(
    forms: int, refused: Callable[[dict[str, Any]], bool] = lambda _: False
) -> Callable[[str, int], str]:
    """Makes a judge for the records of a probe.

    Args:
      forms: number of comparisons that the probe must print.
      refused: tells which comparisons may end with an error of autopar.
    """

    def judge(out: str, code: int) -> str:
        rows = [json.loads(x[7:]) for x in out.splitlines() if x.startswith("RECORD ")]
        need(len(rows) == forms, f"{len(rows)} of {forms} forms ran; {out[-300:]}")
        lines: list[str] = []
        for row in rows:
            if "error" in row:
                need(row["own"] is True and refused(row), str(row))
                lines.append(row["line"])
            else:
                need(row["difference"] <= LIMIT, str(row))
        need(code == 0, f"exit code {code}; {out[-300:]}")
        worst = max((x["difference"] for x in rows if "difference" in x), default=0.0)
        equal = f"{forms - len(lines)} of {forms} equal to jit within {worst:.1e}"
        text = equal if len(lines) < forms else f"all {forms}"
        drawn = sum("own_numbers" in x for x in rows)
        if drawn:
            text += f" ({drawn} with Threefry's keys; the plan says it of others)"
        return "; refused: ".join([text, *dict.fromkeys(lines)])

    return judge


def ffi_names_option(row: dict[str, Any]) -> bool:
    """Whether a foreign call in microbatches is refused with an option that helps."""
    return "ffi_call" in row["line"] and row.get("remedy") == "coupled=microbatch"


def rows_of_others(row: dict[str, Any]) -> bool:
    """Whether an index into rows of other microbatches is refused with a message."""
    return "microbatches" in row["options"] and bool(
        re.search(r"\w+\.py:\d+.* takes rows by numbers .*microbatches=1", row["line"])
    )


def last_batches(out: str, code: int) -> str:
    """All batches run, whatever their order, and give the results of `jax.jit`."""
    need(code == 0, out[-400:])
    seen = re.findall(r"\[lastb\] \(([\d, ]+)\) \[(.*)\]$", out, re.M)
    need(len(seen) == 5, out[-400:])
    for sizes, found in seen:
        wanted = ", ".join(f"({n}, 'ok')" for n in sizes.strip(", ").split(", "))
        need(found == wanted, f"{sizes}: {found}")
    return f"{len(seen)} orders of sizes equal to jit"


def graph(out: str, code: int) -> str:
    """Each form of the step is refused, or has the loss of `jax.jit`."""
    lines = re.findall(r"^64 \d+ \{.*?\} (.*)$", out, re.M)
    need(code == 0 and len(lines) == 4, out[-400:])
    for line in lines:
        numbers = re.match(r"want (\S+) got (\S+)", line)
        close = numbers and abs(float(numbers[1]) - float(numbers[2])) < LIMIT
        need(close or own_error(line.split()[0]), line)
    return f"4 forms; last: {lines[-1][:200]}"


def curve(out: str, code: int) -> str:
    """The output is a curve with rows and positive speeds."""
    need(code == 0 and "Error" not in out, out[-400:])
    rows = re.findall(r"8:h100[^\d]+(\d+)\D.*?(\d+(?:\.\d+)?)", out)
    need(rows and all(float(x[1]) > 0 for x in rows), out[-400:])
    return f"{len(rows)} rows of a curve"


def lost_state(out: str, code: int) -> str:
    """The run ends with the error for lost state, and no step runs again."""
    need(code == 0 and re.search(r"^rc [1-9]\d*$", out, re.M), out[-400:])
    need("where they go back: [] last" in out, out[-400:])
    said = re.search(r"^.*was lost with the processes that held it.*$", out, re.M)
    need(said and "rc 124" not in out, out[-400:])
    return said[0] if said else ""


def stranger_lives(out: str, code: int) -> str:
    """The process of another user is still alive, and the script was started."""
    need(code == 0 and "victim lives" in out, out[-400:])
    need("script runs" in out and "Traceback" not in out, out[-400:])
    return "the unrelated process lives; the script was started"


def damaged_programs(out: str, code: int) -> str:
    """Training goes on with each damaged folder, and no foreign pickle is loaded."""
    need(code == 0 and "uid=" not in out and "PWNED" not in out, out[-400:])
    need(re.search(r"first run rc 0 programs: [1-9]", out), out[:300])
    for kind in ("truncated", "empty", "garbage", "evil", "innercut"):
        need(re.search(rf"^{kind}: rc 0 ", out, re.M), f"{kind}: {out[-700:]}")
    need(re.search(r"another owner, mode 777: rc [0-9]+ used", out), out[-400:])
    damaged = re.findall(r"^run.json .*: rc (\d+) (.*)$", out, re.M)
    need(len(damaged) == 4, out[-600:])
    for rc, line in damaged:
        need(rc == "0" or line.startswith("autopar"), f"run.json: {line}")
    return "5 kinds of damage trained on; nothing foreign was run"


def flipped_programs(out: str, code: int) -> str:
    """After each flipped byte, the losses equal those of the run before the flip."""
    first = re.search(r"^\[39, ([\d.e+-]+),", out, re.M)
    rows = re.findall(r"flip at .*rc (\d+) \[39, ([^,]+), ", out)
    need(code == 0 and first and len(rows) == 8, out[-600:])
    loss = float(first[1]) if first else 0.0
    for rc, found in rows:
        need(rc == "0" and abs(float(found) - loss) <= 1e-5 * abs(loss), str(rows))
    return f"8 flips: loss {loss:.6g} at step 39 each time"


def full_disk(out: str, code: int) -> str:
    """Steps continue while the disk is full, even after a worker has died."""
    lines = re.findall(r"^(steps before|4 s after|12 s after).*?: (.*)$", out, re.M)
    steps = [max(map(int, re.findall(r"\[(\d+)", x[1])), default=-1) for x in lines]
    need(code == 0 and len(steps) == 3, out[-500:])
    need(steps[0] < steps[1] < steps[2], f"steps {steps}: {out[-300:]}")
    need(out.count("supervisor alive: yes") == 2, out[-400:])
    return f"steps {steps[0]}, {steps[1]}, {steps[2]}"


def huge_cluster(out: str, code: int) -> str:
    """The event is refused in one short line, and steps continue without a pause."""
    error = re.search(r"^autopar\.errors\.(\w+): (.*)$", out, re.M)
    returned = re.search(r"^\S+ change returned (.*) [\d.]+ s$", out, re.M)
    need(error or returned, out[-400:])
    # The script's thread ends with this error, and the script gives up after 40 s.
    if error:
        need(own_error(error[1]), error[0])
    line = (error or returned or [""])[0]
    need(len(line) < 300 and "ok=True" not in line, line)
    gaps = [float(x) for x in re.findall(r"^step \d+ since last ([\d.]+)", out, re.M)]
    need(code in (0, 3) and all(x < 1 for x in gaps) and (gaps or returned), out[-400:])
    return f"{line}; gaps between steps at most {max(gaps, default=0.0)} s"


def hears_on(out: str, code: int) -> str:
    """The event after the invalid event is processed."""
    del code  # the script looks into the source in the end
    wrong, after = out.find("\nwrong "), out.rfind("\nheard ")
    need(0 < wrong < after and out.count("heard ") == 3, out[-400:])
    return f"{out[wrong:after].strip().splitlines()[0][:150]}..., and heard the next"


def endpoint(out: str, code: int) -> str:
    """During floods and slow connections, only valid requests are served."""
    need(code == 0 and re.search(r"^after: \(200", out, re.M), out[-400:])
    need(re.search(r"^no token: \(401", out, re.M), out[:400])
    flood = re.search(r"10 good requests meanwhile: \[(.*)\]", out)
    slow = re.search(r"good request\): \[(.*)\]", out)
    need(flood and slow, out[-400:])
    for found, count in ((flood, 10), (slow, 10)):
        answers = re.findall(r"\b(20\d)\b", found[1] if found else "")
        need(len(answers) == count, found[0][-390:] if found else "")
    return "10 of 10 valid requests answered beside each"


def out_of_bounds(row: dict[str, Any]) -> bool:
    """Whether a file is refused because it reads outside of its storage."""
    said = re.search("storage|a size, an offset or a stride is negative", row["line"])
    return row["error"] == "CheckpointError" and said is not None


def train_edge(ends: str, said: str) -> Callable[[str, int], str]:
    """Makes a judge for the end of `autopar.train` and its message."""

    def judge(out: str, code: int) -> str:
        found = re.search(rf"^\w+ {ends}.*$", out, re.M)
        need(code == 0 and found, out[-500:])
        line = found[0] if found else ""
        if "->" in line:
            need(own_error(line.split("->")[1].split()[0]), line)
        else:
            need("nan" not in line.split("...")[-1], line)
        need(re.search(said, out), out[-500:])
        return line[:250]

    return judge
