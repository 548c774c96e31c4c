import atexit
import os
import shutil
import tempfile

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

# Every graph that a test builds is checked.
os.environ.setdefault("AUTOPAR_VERIFY", "1")

import jax

# Every test that needs devices sees the same eight simulated ones. This must
# happen before anything starts a JAX backend.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# The fixtures ``run`` and ``saved`` of the command line's tests: one `conftest` is all
# that the doctests of a whole run can tell apart.
pytest_plugins = ("command_line_fixtures",)
