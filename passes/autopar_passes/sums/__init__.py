"""Partial sums: where they may be deferred, and how they are held until then."""
