"""Pipeline stages: the layers, their costs on submeshes, and the choice of a
pipeline.
"""
