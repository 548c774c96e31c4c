"""Sources of events. The rest of `autopar.elastic` depends on no particular source."""
