"""evener: train one PyTorch model across the machines you have, and understand what happened."""

__version__ = "0.1.0"
