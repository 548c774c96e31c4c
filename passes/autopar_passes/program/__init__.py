"""The flat program: traces a step and inlines its calls."""
