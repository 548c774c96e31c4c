"""The integer program of a field, and the backends that solve it."""
