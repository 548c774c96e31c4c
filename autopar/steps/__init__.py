"""Facts of a training step that know no cluster."""
