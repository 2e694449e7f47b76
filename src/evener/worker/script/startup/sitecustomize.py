"""Python imports this module at its start, as its folder is on PYTHONPATH: instrument the program of a rank.

Another sitecustomize that Python would import, such as a distribution's, is executed as well.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _execute_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "EVENER_SCRIPT" in os.environ and "RANK" in os.environ:
    try:
        from evener.worker.script.instrument import install
    except ImportError:  # a Python without evener, which the program has started
        pass
    else:
        install()
_execute_next()
