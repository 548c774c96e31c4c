"""Exact reductions: each shrinks a graph and keeps at least one best solution.

Every reduction is a function ``(graph) -> None`` that records on the graph's trail how
choices are found again. None changes the least cost under the memory limit.
"""
