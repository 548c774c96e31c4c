"""The version of the package, which the build reads as well."""

__version__ = "0.1.0"
