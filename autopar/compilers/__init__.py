"""XLA's compilers for accelerators, on a host that has none."""
