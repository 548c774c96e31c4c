"""Lower bounds of a field's cost, and of the cost with each strategy."""
