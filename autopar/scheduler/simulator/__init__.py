"""A simulator of scheduling policies on traces of jobs, with measured step times."""
