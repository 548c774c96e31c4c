"""From an operator graph and a cluster to the plan that runs fastest."""
