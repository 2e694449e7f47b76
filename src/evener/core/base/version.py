"""The version of evener."""

__version__ = "0.2.0"
