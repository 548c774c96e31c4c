import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

# What one test has compiled, the others find: the workers of a run share this.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _programs = tempfile.mkdtemp(prefix="autopar-tests-")
    atexit.register(shutil.rmtree, _programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Most of a test's time is compilation: machine code need not be fast. The emitter of
# fusions that XLA uses by default compiles for a half longer than the older one.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)

# Processes that tests start read the modules that the first of them has compiled:
# each would compile the product's 500 modules for a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A slow machine would have commands say how far they are.
os.environ.setdefault("AUTOPAR_PROGRESS", "0")

# Output is compared as it is in a pipe, whatever terminal the tests are started in.
os.environ.pop("COLUMNS", None)

# Every graph that a test builds is checked.
os.environ.setdefault("AUTOPAR_VERIFY", "1")

import jax
import slow_tests
from property_tests import take_profile

take_profile()

# The next run reads the tests as pytest has rewritten them.
sys.dont_write_bytecode = False

# Every test that needs devices sees the same eight simulated ones. This must
# happen before anything starts a JAX backend.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# The key of files that are kept is no key of the user who runs the tests.
_state = tempfile.mkdtemp(prefix="autopar-tests-state-")
atexit.register(shutil.rmtree, _state, ignore_errors=True)
os.environ["XDG_STATE_HOME"] = _state

# JAX keeps each program that it has lowered, in a context of its own of 1.2 MB. With
# 3,000 of them, lowering one more takes three times as long, and workers grow to 4 GB.
MOST_PROGRAMS = 300
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@pytest.fixture(scope="session")
def lowered_programs() -> Iterator[list[str]]:
    """A list with one item for each program that was lowered since it was cleared."""
    found: list[str] = []

    def hear(event: str, *_: Any, **__: Any) -> None:
        if event == LOWERED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    yield found
    jax.monitoring.unregister_event_duration_listener(hear)


@pytest.fixture(scope="module", autouse=True)
def _few_programs(lowered_programs: list[str]) -> Iterator[None]:
    """Clears JAX's caches after modules that have lowered many programs."""
    yield
    if len(lowered_programs) > MOST_PROGRAMS:
        lowered_programs.clear()
        jax.clear_caches()


def pytest_collection_finish() -> None:
    """Moves the objects that exist before the tests to the oldest generation of the
    garbage collector, which it seldom visits.

    The objects are not frozen, because a planner that pauses the collector counts
    frozen objects.
    """
    gc.collect()
    # Tracing makes many objects that stay for a while: look at them less often.
    gc.set_threshold(10_000, 20, 50)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out most cases of the slowest tests, except for `make test ALL=1`."""
    if slow_tests.leaves_out(config.args, config.getini("testpaths")):
        kept = slow_tests.kept([item.nodeid for item in items])
        left = [item for item in items if item.nodeid not in kept]
        items[:] = [item for item in items if item.nodeid in kept]
        config.hook.pytest_deselected(items=left)


# Tests of these are about running a plan: their steps are planned as they are written,
# and where no number of stages, microbatches or layers is asked for none is looked for.
# All others plan as a user does.
RUN_AS_WRITTEN = (
    "tests/autopar/runtime/",
    "tests/autopar/compression/",
    "tests/autopar/elastic/",
    "tests/autopar/checkpoint/",
    "tests/autopar/profiling/",
    "tests/autopar/reports/",
    "tests/autopar/test_misuse.py",
    "tests/autopar/cli/test_cli_compression.py",
    "tests/autopar/cli/test_cli_goodput.py",
    "tests/autopar/cli/test_cli_run.py",
    "tests/autopar/cli/test_cli_sweep.py",
    "tests/autopar/cli/test_cli_width.py",
)


@pytest.fixture(scope="module", autouse=True)
def _run_as_written(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes the tests of a module plan only layouts, unless they give other options."""
    if not str(request.node.nodeid).startswith(RUN_AS_WRITTEN):
        yield
        return
    # Late: doctests and the tests of the solver need no planner.
    from autopar.planner import options, programs

    def asked(given: options.PlanOptions) -> options.PlanOptions:
        chooses = given.schedule is not None or given.stages == "auto"
        return given if chooses else options.as_written(given)

    decide = options.decide_open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "decide_open", lambda given: decide(asked(given)))
        yield


# The fixtures of the command line's tests and of Slurm's: one `conftest` is all
# that the doctests of a whole run can tell apart.
pytest_plugins = ("command_line_fixtures", "slurm_fixtures")
