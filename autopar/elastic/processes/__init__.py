"""A training run of several processes, which may leave and join meanwhile.

A world is a set of processes that train together. When processes leave or join, a
new world forms.
"""
