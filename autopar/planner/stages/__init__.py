"""Plans pipelines: layers, submeshes, microbatches, schedules, and their record."""
