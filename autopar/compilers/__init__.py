"""XLA's compilers for accelerators, for hosts without an accelerator."""
