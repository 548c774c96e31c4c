"""The cost model: seconds and bytes of a plan's step. See docs/cost-model.md."""
