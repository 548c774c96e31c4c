"""The cost model: seconds and bytes of what a plan does. See docs/cost-model.md."""
