"""Starts elastic runs on clusters that other programs manage."""
