"""evener export: write a trained model in the format of Hugging Face's transformers."""

from __future__ import annotations

import typer

from evener.core.base.escaped_output import print_escaped

EXAMPLES = "evener export runs/mine --out mine"


def export(
    run: str = typer.Argument(..., help="run directory"),
    out: str | None = typer.Option(None, help="a new folder [RUN/export]"),
    step: int | None = typer.Option(None, min=0, help="checkpoint [newest]"),
    merge: bool = typer.Option(False, "--merge", help="of LoRA adapters: the whole model with the adapters merged in"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Write a folder that Hugging Face's transformers loads: weights, configuration and tokenizer.

    For GPT-2 architectures: tiny, char, gpt2 and its sizes. `AutoModelForCausalLM.from_pretrained("mine")` loads the
    folder, and so does `--init-from` of evener. A fine-tuned model is written whole in fp32, or if it has LoRA adapters
    these alone, for peft; --merge writes the whole model then.
    """
    import json
    from pathlib import Path

    import msgspec

    from evener.core.base.errors import UsageError
    from evener.core.base.file_io import write_folder_atomic
    from evener.core.run.resolve import pretrained_of_run
    from evener.core.run.rundir import RunDir
    from evener.corpus.huggingface import write_tokenizer
    from evener.corpus.tokenizer import load_run_tokenizer
    from evener.launch.torch_subprocess import program_lines

    rundir = RunDir(run)
    manifest, folder = rundir.manifest(), rundir.verified_checkpoint(step)
    target, pretrained = Path(out or rundir.inside("export")), pretrained_of_run(rundir)
    if target.exists():
        raise UsageError(f"--out {target}: exists already", hint="another --out")
    if merge and (pretrained is None or pretrained[1].lora_rank is None):
        raise UsageError(f"--merge: {rundir} has no LoRA adapters", hint="without --merge")

    def write_fine_tuned(place: Path) -> None:
        assert pretrained is not None
        trained = {"checkpoint": str(folder), "model": str(pretrained[0]), "lora_rank": pretrained[1].lora_rank}
        request = {"trained": trained, "merge": merge, "out": str(place)}
        list(program_lines("evener.worker.finetune.export", json.dumps(request)))

    if manifest.corpus is None or manifest.shape is None:
        raise UsageError(f"{rundir}: not one of evener's models", hint="load its weights.safetensors in your program")
    shape, tokenizer = manifest.shape, load_run_tokenizer(rundir.path, manifest.corpus)

    def write_own(place: Path) -> None:
        request = {"checkpoint": str(folder), "shape": msgspec.to_builtins(shape), "out": str(place),
                   "end_of_text": tokenizer.end_of_text}  # fmt: skip
        list(program_lines("evener.worker.export_hf", json.dumps(request)))
        write_tokenizer(tokenizer, place, shape.block_size)

    try:
        write_folder_atomic(target, write_own if pretrained is None else write_fine_tuned)
    except OSError as error:
        raise UsageError(f"--out {target}: {error.strerror}", hint="another --out") from None
    print_escaped(json.dumps({"out": str(target), "checkpoint": str(folder)}) if as_json else target)
    return 0
