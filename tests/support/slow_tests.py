"""Selects a quarter of the cases of the slowest tests for a run of the whole suite.

In CI the quarter depends on the number of commits, so four runs cover all cases.
Elsewhere the quarter is always the same.

``slow_tests.txt`` in this folder has one name per line. To rewrite it:

    make test ALL=1 PYTEST_ARGS=--junitxml=build/tests.xml
    python tests/support/slow_tests.py build/tests.xml --seconds 3
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import subprocess
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Sequence

QUARTERS = 4
PATH = pathlib.Path(__file__).with_name("slow_tests.txt")


def names() -> frozenset[str]:
    """The names of the slow tests, in the form of `name_of`."""
    return frozenset(PATH.read_text().split())


def name_of(node: str) -> str:
    """The name of a test for all its parameters: its module, class and function.

    >>> name_of("tests/solver/test_a.py::TestB::test_c[1-2]")
    'tests/solver/test_a.py::TestB::test_c'
    """
    return node.partition("[")[0]


def kept(nodes: Sequence[str]) -> frozenset[str]:
    """The tests that a run of the whole suite keeps.

    Every fourth case of a slow test is kept. The first kept case depends on the name of
    the test, so tests without parameters are spread over the quarters.

    Args:
      nodes: all tests.
    """
    slow, turn, counts = names(), _turn(), collections.Counter[str]()
    found: list[str] = []
    for node in nodes:
        name = name_of(node)
        number = zlib.crc32(name.encode()) + counts[name]
        counts[name] += 1
        if name not in slow or number % QUARTERS == turn:
            found.append(node)
    return frozenset(found)


def _turn() -> int:
    """The number of the kept quarter."""
    if not os.environ.get("CI"):
        return 0
    count = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"],
        cwd=PATH.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return int(count.stdout or 0) % QUARTERS


def leaves_out(given: Sequence[str], default: Sequence[str]) -> bool:
    """Whether a run omits slow tests, because the user has not selected tests.

    Args:
      given: the paths of the run.
      default: the paths of a run of the whole suite.
    """
    asked = os.environ.get("AUTOPAR_ALL_TESTS")
    return not asked and list(given) == list(default)


def seconds_of(path: pathlib.Path) -> dict[str, float]:
    """The seconds of each test, summed over parameters, from pytest's JUnit file."""
    found: dict[str, float] = collections.defaultdict(float)
    for case in ET.parse(path).iter("testcase"):
        *places, last = case.attrib["classname"].split(".")
        file = "/".join([*places, last]) + ".py"
        if not pathlib.Path(file).exists():  # the last part is a class
            file = "/".join(places) + f".py::{last}"
        found[name_of(f"{file}::{case.attrib['name']}")] += float(case.attrib["time"])
    return found


def main() -> None:
    """Writes the names of the slow tests, and prints how long they take."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("junit", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=3.0, help="from which on")
    given = parser.parse_args()
    found = seconds_of(given.junit)
    slow = sorted(name for name, s in found.items() if s >= given.seconds)
    PATH.write_text("".join(f"{name}\n" for name in slow))
    taken, whole = sum(found[name] for name in slow), sum(found.values())
    print(f"{len(slow)} of {len(found)} tests take {taken:.0f} of {whole:.0f} s")


if __name__ == "__main__":
    main()
