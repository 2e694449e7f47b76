"""evener export: write a trained model in the format of Hugging Face's transformers."""

from __future__ import annotations

import typer

from evener.core.base.escaped_output import print_escaped

EXAMPLES = "evener export runs/mine --out mine"


def export(
    run: str = typer.Argument(..., help="run directory"),
    out: str | None = typer.Option(None, help="a new folder [RUN/export]"),
    step: int | None = typer.Option(None, min=0, help="checkpoint [newest]"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Write a folder that Hugging Face's transformers loads: weights, configuration and tokenizer.

    For GPT-2 architectures: tiny, char, gpt2 and its sizes. `AutoModelForCausalLM.from_pretrained("mine")` loads the
    folder, and so does `--init-from` of evener.
    """
    import json
    from pathlib import Path

    import msgspec

    from evener.core.base.errors import UsageError
    from evener.core.base.file_io import write_folder_atomic
    from evener.core.run.rundir import RunDir
    from evener.corpus.huggingface import write_tokenizer
    from evener.corpus.tokenizer import load_run_tokenizer
    from evener.launch.torch_subprocess import program_lines

    rundir = RunDir(run)
    manifest, folder = rundir.manifest(), rundir.verified_checkpoint(step)
    if manifest.corpus is None or manifest.shape is None:
        raise UsageError(f"{rundir}: not one of evener's models", hint="load its weights.safetensors in your program")
    target, shape = Path(out or rundir.inside("export")), manifest.shape
    if target.exists():
        raise UsageError(f"--out {target}: exists already", hint="another --out")
    tokenizer = load_run_tokenizer(rundir.path, manifest.corpus)

    def write(place: Path) -> None:
        request = {"checkpoint": str(folder), "shape": msgspec.to_builtins(shape), "out": str(place),
                   "end_of_text": tokenizer.end_of_text}  # fmt: skip
        list(program_lines("evener.worker.export_hf", json.dumps(request)))
        write_tokenizer(tokenizer, place, shape.block_size)

    try:
        write_folder_atomic(target, write)
    except OSError as error:
        raise UsageError(f"--out {target}: {error.strerror}", hint="another --out") from None
    print_escaped(json.dumps({"out": str(target), "checkpoint": str(folder)}) if as_json else target)
    return 0
