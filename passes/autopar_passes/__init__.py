"""Turns a train step into an operator graph, and a planned graph into a program.

Each subpackage may import only those above it in this list:

* ``program``: traces a step and inlines its calls into a flat program;
* ``layer_loops``: cuts loops over layers, and their state, into pieces;
* ``rules``: sharding rules and FLOPs of single equations;
* ``graph``: the operator graph: roles of operators, repeated layers, checks;
* ``sums``: sums of partial results that may be deferred;
* ``replay``: runs a program with the layouts of a plan stated in it;
* ``audit``: reads from the compiler's output what a program communicates.
"""
