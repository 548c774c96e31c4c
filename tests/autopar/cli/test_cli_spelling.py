"""Tests that errors spell options as on the command line, and name the user's lines."""

from __future__ import annotations

import pytest
from command_line import SMALL, TARGET, Run, assert_fails

from autopar.cli.failures import spell_options

PLAN = ("plan", TARGET, *SMALL, "--cluster")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            (*PLAN, "8:cpu", "--schedule", "1f1b", "--stages", "1"),
            ("--schedule 1f1b ", "--stages 1"),
        ),
        ((*PLAN, "8:cpu", "--remat", "9"), ("--remat 9: ",)),
        ((*PLAN, "8x8:cpu", "--max-axes", "1"), ("--max-axes 1 is",)),
        ((*PLAN, "4:cpu", "--axis-names", "a,b,c"), ("--axis-names a,b,c: ",)),
        (
            (*PLAN, "4:h100+4:a100", "--stages", "2", "--microbatches", "8+4"),
            ("--microbatches 8+4 are", "leave --stages out"),
        ),
        ((*PLAN, "8:h10"), ("Example: --cluster 8x8:h100",)),
        ((*PLAN, "8:cpu", "--memry", "1GB"), ("--memory", "See autopar plan --help.")),
        (("ledger", "none.jsonl"), ("autopar: none.jsonl: No such file or",)),
        (("simulate", "none.csv", "--cluster", "2x4"), ("read: No such file or",)),
        (("workers", "nowhere"), ("autopar run --folder nowhere SCRIPT.py",)),
        (("workers", "--folder", "my runs"), ("run --folder 'my runs' SCRIPT.py",)),
        (("workers", "a", "--folder", "b"), ("give the folder once: --folder b.",)),
        # What the user's own function takes keeps its name.
        ((*PLAN, "8:cpu", "remat=1"), ("'remat'", "layers=2, width=256")),
    ],
)
def test_options_are_spelled_as_given(
    words: tuple[str, ...], parts: tuple[str, ...], run: Run
) -> None:
    assert_fails(run(*words), *parts)


def test_a_memory_error_says_what_the_command_has(run: Run) -> None:
    words = ["batch=4096", "--cluster", "2:cpu,memory=1MB"]
    words += ["--stages", "1", "--microbatches", "1", "--remat", "0"]
    result = run("plan", TARGET, *words)
    hint = "or --remat auto, --microbatches auto"
    assert_fails(result, "(two_layers.py:", ". try: ", hint, code=3)
    assert "_tree_math" not in result.err


def test_cells_are_spelled_as_the_command_line_is(run: Run) -> None:
    """What a command has no option for is named as the decorator's."""
    words = (*SMALL, "--cluster", "2:cpu", "--cluster", "2x2:cpu", "--max-axes", 1)
    assert "--max-axes 1 is too few" in run("sweep", TARGET, *words).out
    other = "goodput takes microbatches=2 itself; last_batch='run' stays"
    assert spell_options(other, ["--seconds"]) == (
        "goodput takes autopar plan --microbatches 2 itself; "
        "autopar.parallelize(last_batch='run') stays"
    )


def test_a_memory_error_of_microbatches_names_the_users_line(run: Run) -> None:
    words = ("--cluster", "2:cpu,memory=1MB", "--microbatches", "2")
    result = run("plan", TARGET, "batch=256", *words)
    assert_fails(result, "(two_layers.py:", code=3)
    assert ".py:" not in result.err.replace("two_layers.py:", "")
