"""The version of evener."""

__version__ = "0.1.0"
