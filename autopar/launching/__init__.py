"""Starts elastic runs on clusters that Kubernetes or Slurm manages."""
