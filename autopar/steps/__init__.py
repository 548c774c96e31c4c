"""Properties of a training step that do not depend on a cluster."""
