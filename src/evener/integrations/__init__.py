"""Classes for people who write with another library's trainer. Each module needs that library, which its extra has."""
