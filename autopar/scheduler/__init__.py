"""Which jobs get which devices: policies, and a simulator that runs them."""
