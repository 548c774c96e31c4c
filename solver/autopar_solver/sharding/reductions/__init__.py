"""Exact reductions: each shrinks a graph and keeps at least one best solution.

Every reduction is a function ``(graph) -> None``. It records on the graph's trail how
to recover the removed choices. No reduction changes the least cost under the memory
limit.
"""
