"""evener export: write a trained model in the format of Hugging Face's transformers, or of llama.cpp."""

from __future__ import annotations

import typer

from evener.core.base.escaped_output import print_escaped

EXAMPLES = "evener export runs/mine --out mine"


def export(
    run: str = typer.Argument(..., help="run directory"),
    out: str | None = typer.Option(None, help="a new folder [RUN/export]"),
    gguf: str | None = typer.Option(None, metavar="FILE", help="write the whole model for llama.cpp, in fp16, instead"),
    step: int | None = typer.Option(None, min=0, help="checkpoint [newest]"),
    merge: bool = typer.Option(False, "--merge", help="of LoRA adapters: the whole model with the adapters merged in"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Write a folder that Hugging Face's transformers loads: weights, configuration and tokenizer.

    For GPT-2 architectures: tiny, char, gpt2 and its sizes. `AutoModelForCausalLM.from_pretrained("mine")` loads the
    folder, and so does `--init-from` of evener. A fine-tuned model is written whole in fp32, or if it has LoRA adapters
    these alone, for peft; --merge writes the whole model then. --gguf writes one file, adapters merged in: of models
    like Llama, Qwen2 and GPT-2 with a BPE tokenizer, byte-level or SentencePiece's.
    """
    import importlib.util
    import json
    import tempfile
    from pathlib import Path

    import msgspec

    from evener.core.base.errors import UsageError
    from evener.core.base.file_io import fsync_path, rename_durably, write_folder_atomic
    from evener.core.run.resolve import pretrained_of_run
    from evener.core.run.rundir import RunDir
    from evener.corpus.huggingface import write_tokenizer
    from evener.corpus.tokenizer import load_run_tokenizer
    from evener.launch.torch_subprocess import program_lines

    if gguf is not None and out is not None:
        raise UsageError(f"--gguf {gguf}: --out {out} is for transformers", hint="one of them")
    if gguf is not None and importlib.util.find_spec("gguf") is None:
        raise UsageError(f"--gguf {gguf}: it needs gguf", hint="pip install 'evener[gguf]'")
    rundir = RunDir(run)
    manifest, folder = rundir.manifest(), rundir.verified_checkpoint(step)
    target, pretrained = Path(gguf or out or rundir.inside("export")), pretrained_of_run(rundir)
    flag = "--out" if gguf is None else "--gguf"
    if target.exists():
        raise UsageError(f"{flag} {target}: exists already", hint=f"another {flag}")
    if merge and (pretrained is None or pretrained[1].lora_rank is None):
        raise UsageError(f"--merge: {rundir} has no LoRA adapters", hint="without --merge")
    if manifest.corpus is None or manifest.shape is None:
        raise UsageError(f"{rundir}: not one of evener's models", hint="load its weights.safetensors in your program")
    shape, tokenizer = manifest.shape, load_run_tokenizer(rundir.path, manifest.corpus)

    def write_fine_tuned(place: Path) -> None:
        assert pretrained is not None
        model, shape = pretrained
        trained = {"checkpoint": str(folder), "model": str(model), "lora_rank": shape.lora_rank,
                   "has_dora": shape.has_dora}  # fmt: skip
        is_merged = shape.lora_rank is not None and (merge or gguf is not None)
        request = {"trained": trained, "merge": is_merged, "out": str(place)}
        list(program_lines("evener.worker.finetune.export", json.dumps(request)))

    def write_own(place: Path) -> None:
        request = {"checkpoint": str(folder), "shape": msgspec.to_builtins(shape), "out": str(place),
                   "end_of_text": tokenizer.end_of_text}  # fmt: skip
        list(program_lines("evener.worker.export_hf", json.dumps(request)))
        write_tokenizer(tokenizer, place, shape.block_size)

    write = write_own if pretrained is None else write_fine_tuned
    try:
        if gguf is None:
            write_folder_atomic(target, write)
        else:
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
                write(Path(temporary))
                file = Path(temporary) / "model.gguf"
                request = {"folder": temporary, "name": target.stem, "out": str(file)}
                list(program_lines("evener.worker.export_gguf", json.dumps(request)))
                fsync_path(file)
                rename_durably(file, target)
    except OSError as error:
        raise UsageError(f"{flag} {target}: {error.strerror}", hint=f"another {flag}") from None
    print_escaped(json.dumps({"out": str(target), "checkpoint": str(folder)}) if as_json else target)
    return 0
