"""Saves the training state under one plan, and restores it under any other plan."""
