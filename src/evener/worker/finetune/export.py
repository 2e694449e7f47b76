"""Export what a run has fine-tuned: `python -m evener.worker.finetune.export REQUEST`.

REQUEST is JSON: {"trained": a FineTunedCheckpoint, "merge", "out": an existing folder}. Adapters are written in peft's
format; a whole model, or one with `merge` into which its adapters are merged, in transformers', in fp32.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.errors import exit_status_of
from evener.core.base.file_io import read_file, write_atomic
from evener.core.model.pretrained import pretrained_files
from evener.worker.finetune.fine_tuned_checkpoint import FineTunedCheckpoint


class FineTunedExport(msgspec.Struct, frozen=True, kw_only=True):
    """The request to export a fine-tuned model."""

    trained: FineTunedCheckpoint
    merge: bool
    out: str


def export(request: FineTunedExport) -> None:
    """Write the adapters, or the whole model with its configuration; and the tokenizer."""
    model, source, out = request.trained.load(), Path(request.trained.model), Path(request.out)
    has_adapters = request.trained.lora_rank is not None and not request.merge
    if request.trained.lora_rank is not None and request.merge:
        model = model.merge_and_unload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(out)
    if not has_adapters:  # the published configuration, with its dropout
        config = json.loads(read_file(source / "config.json")) | {"dtype": "float32"}
        config.pop("torch_dtype", None)
        write_atomic(out / "config.json", json.dumps(config, indent=2).encode() + b"\n")
    (out / "README.md").unlink(missing_ok=True)  # peft's, which is a form to fill in
    for name, path in pretrained_files(source).items():
        if not name.endswith((".safetensors", "index.json")) and name != "config.json":
            write_atomic(out / name, read_file(path))


def main() -> int:
    return exit_status_of(lambda: export(from_json(sys.argv[1], FineTunedExport)))


if __name__ == "__main__":
    sys.exit(main())
