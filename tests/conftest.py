import jax

# Every test that needs devices sees the same eight simulated ones. This must
# happen before anything starts a JAX backend.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
