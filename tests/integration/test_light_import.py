"""Importing evener imports no dataframe package."""

from __future__ import annotations

import subprocess
import sys


def test_evener_imports_no_dataframe_package(tmp_path, write_run):
    run = write_run(tmp_path / "run", [{}]).path
    code = "import sys, evener; assert not {'pandas', 'polars', 'numpy', 'torch', 'msgspec'} & sys.modules.keys(); "
    code += f"evener.read_run({str(run)!r}); assert not {{'pandas', 'polars', 'torch'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
