import os

# Most of a test's time is compilation: machine code need not be fast.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

# Every graph that a test builds is checked.
os.environ.setdefault("AUTOPAR_VERIFY", "1")

import jax

# Every test that needs devices sees the same eight simulated ones. This must
# happen before anything starts a JAX backend.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
