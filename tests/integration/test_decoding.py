"""Two threads may decode the first value of a type at once; with msgspec's own functions the process would crash."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading, time
import msgspec._utils as utils
import msgspec
from evener.core.base.decoding import from_json, from_builtins, json_decoder

learned = utils._get_class_mro_and_typevar_mappings
def slowly(kind):
    time.sleep(0.02)  # the other thread comes while the type is half learned
    return learned(kind)
utils._get_class_mro_and_typevar_mappings = slowly

class Inner(msgspec.Struct):
    a: int

class First(msgspec.Struct):
    text: str
    inner: list[Inner]

class Second(First): ...

class Third(First): ...

tree, text = {"text": "", "inner": [{"a": 1}]}, b'{"text": "", "inner": [{"a": 1}]}'
tries = [
    lambda: from_builtins(tree, First), lambda: from_json(text, Second), lambda: json_decoder(Third).decode(text)
]
for one in tries:
    threads = [threading.Timer(0.01 * i, one) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("alive")
"""


def test_concurrent_decoding_of_new_type_is_safe():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
