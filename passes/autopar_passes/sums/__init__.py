"""Partial sums: where sums may be deferred, and how partial results are stored."""
