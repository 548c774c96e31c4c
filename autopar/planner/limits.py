"""The limits of a search that hold where nothing is said, for every way to plan.

Nothing here imports JAX: the help of the commands states these limits.
"""

# Time limit of the search, for each mesh. Most plans are proved optimal in a tenth of
# it; with very tight memory the solver would go on for minutes to close the last
# percent.
SOLVER_SECONDS = 10.0
