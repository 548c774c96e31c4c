"""Pipeline stages: layers, what they cost on submeshes, and the pipeline chosen."""
