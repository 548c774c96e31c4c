"""Tries autopar on train steps that other people wrote.

    python benchmarks/third_party.py --source DIR [--transformers PYTHON]

DIR is a checkout of github.com/google/flax. Nothing is copied from it: the examples are
imported, and stubs replace the packages of their data pipelines. ``--python`` is the
interpreter for the rows; its environment needs dm-haiku, clu, jraph, ml-collections,
absl-py and equinox in addition to autopar's dependencies. ``--transformers`` is an
interpreter with transformers 4. Steps whose packages are missing are skipped, with the
reason.

Each step is planned at its authors' size for two clusters. Then a small version runs 4
steps on 8 simulated devices, and all its results and changed objects are compared with
one device. Prints a table; ``--markdown FILE`` also writes it to a file. ``--parts w``
runs each step with microbatches, in two stages, and with all layers rematerialised.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent / "third"
CLUSTERS = ("8x8:h100", "2x4:a100")
FLAX = (
    "mnist",
    "vae",
    "sst2",
    "seq2seq",
    "ogbg_molpcba",
    "ppo",
    "imagenet",
    "wmt",
    "lm1b",
    "nlp_seq",
    "gemma",
)
HUGGINGFACE = ("gpt2", "bert", "vit", "whisper", "llama")
OTHERS = ("equinox_cnn", "equinox_stateful", "haiku_transformer")
WAYS = ("microbatches", "stages", "remat")
HEADER = ("step", *CLUSTERS, "ran", "returned", "state", "rounding", "user changed")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step: the module that builds it, and the command of its process.

    Attributes:
      family: module in ``third/``.
      name: name of the builder function in this module.
      python: interpreter; empty: the step is skipped.
      source: checkout with the example; empty: none is needed.
      reason: reason to skip the step.
    """

    family: str
    name: str
    python: str
    source: str = ""
    reason: str = ""

    @property
    def title(self) -> str:
        """The title of the step in the table."""
        prefix = {"flax_examples": "flax/", "huggingface": "transformers/"}
        return prefix.get(self.family, "") + self.name


def steps(source: str, python: str, transformers: str) -> list[Step]:
    """All steps; a step that cannot be tried here has a reason."""
    found: list[Step] = []
    for name in FLAX:
        folder = pathlib.Path(source, "examples", name)
        missing = "" if source and folder.is_dir() else f"no {folder}: give --source"
        found.append(Step("flax_examples", name, python, source, missing))
    missing = "" if transformers else "give --transformers"
    found += [Step("huggingface", n, transformers, reason=missing) for n in HUGGINGFACE]
    return found + [Step("other_libraries", name, python) for name in OTHERS]


def tried(step: Step, parts: str, limit_s: float) -> dict[str, Any]:
    """The output of a separate process about a step."""
    if step.reason:
        return {"skipped": step.reason}
    command = [step.python, str(FOLDER / "row.py"), step.family, step.name]
    try:
        done = subprocess.run(
            [*command, step.source, parts],
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit_s:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith("ROW"):
            return json.loads(line.removeprefix("ROW"))
    last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    kind = "skipped" if "ModuleNotFoundError" in last else "error"
    return {kind: last}


def cells(title: str, found: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    if why := found.get("skipped") or found.get("error"):
        kind = "skipped" if "skipped" in found else "failed"
        return (title, "", "", f"{kind}: {why}", "", "", "", "")
    plans = [_planned(found.get(cluster)) for cluster in CLUSTERS]
    changed = found.get("changed") or "nothing"
    return (title, *plans, *_ran(found.get("run")), changed)


def _planned(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "error" in found:
        return f"**{_first(found['error'])}**"
    mesh = " x ".join(f"{name} {size}" for name, size in found["mesh"].items())
    return f"{found['seconds']:.0f} s, {mesh}"


def _ran(found: dict[str, Any] | None) -> tuple[str, str, str, str]:
    if found is None:
        return ("", "", "", "")
    if "error" in found:
        return (f"**{_first(found['error'])}**", "", "", "")
    returned, state = found["returned"], found["state"]
    wrong = [*returned["wrong"], *state["wrong"]]
    split = f"{found['operators split']} of {found['operators']} operators split"
    verdict = f"**differs: {', '.join(wrong[:2])}**" if wrong else f"yes, {split}"
    rounded = returned["rounded"] + state["rounded"]
    times = max(returned["times"], state["times"])
    return (
        verdict,
        *map(_largest, (returned, state)),
        f"{rounded}: {times:.1f}x" if rounded else "0",
    )


def way_cells(title: str, found: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table of options that run a step in another way."""
    if why := found.get("skipped") or found.get("error"):
        kind = "skipped" if "skipped" in found else "failed"
        return (title, f"{kind}: {why}", *("" for _ in WAYS[1:]))
    return (title, *(_way(found[way]) for way in WAYS))


def _way(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"**{_first(found['error'])}**"
    if "refused" in found:
        return f"refused: {_first(found['refused'])}"
    wrong = [*found["returned"]["wrong"], *found["state"]["wrong"]]
    if wrong:
        return f"**differs: {', '.join(wrong[:2])}**"
    largest = max(found["returned"]["largest"], found["state"]["largest"])
    local = f"; alone: {_first(', '.join(found['local']))}" if found["local"] else ""
    return f"{largest:.1e}{local}"


def _largest(found: dict[str, Any]) -> str:
    if not found["arrays"]:
        return "nothing"
    return f"{found['largest']:.1e} in {found['arrays']} arrays"


def _first(text: str) -> str:
    return text.split("\n", 1)[0][:160]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in markdown."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="", help="checkout of google/flax")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--transformers", default="", help="interpreter that has it")
    parser.add_argument("--only", default="", help="names, with commas")
    parser.add_argument("--parts", default="pr", help="p: plan, r: run, w: ways")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds a step")
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--save", type=pathlib.Path, help="everything, as JSON")
    chosen = parser.parse_args()
    wanted = chosen.only.split(",") if chosen.only else None
    rows: list[tuple[str, ...]] = []
    everything: dict[str, Any] = {}
    for step in steps(chosen.source, chosen.python, chosen.transformers):
        if wanted is not None and step.name not in wanted:
            continue
        found = tried(step, chosen.parts, chosen.limit)
        everything[step.title] = found
        row = way_cells if chosen.parts == "w" else cells
        rows.append(row(step.title, found))
        print(" | ".join(rows[-1]), flush=True)
        if chosen.save:
            chosen.save.write_text(json.dumps(everything, indent=1))
    header = ("step", *WAYS) if chosen.parts == "w" else HEADER
    text = "\n".join(table(header, rows))
    print(f"\n{text}")
    if chosen.markdown:
        chosen.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
