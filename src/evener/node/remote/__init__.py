"""Modules that a session sends to a host's own Python: standard library only, Python 3.8 or newer, Linux or macOS."""

from pathlib import Path

REMOTE_DIR = Path(__file__).parent
