"""Models of the Hugging Face hub: `--model hf:ORG/NAME`, from the hub's cache here, or downloaded into it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from evener.cli.run_output import print_status
from evener.core.base.errors import UsageError
from evener.core.model.pretrained import TOKENIZER_FILES, pretrained_files, require_libraries
from evener.core.run.run_spec import PRETRAINED_PREFIX, RunSpec

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# of what a model's page offers, the files that evener reads: no pickles, and no second copy of the weights
HUB_FILES = [
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
    *TOKENIZER_FILES,
]  # fmt: skip


def with_model_folder(spec: RunSpec) -> RunSpec:
    """Return the spec with the absolute path of a pretrained model, so that the run is resumed from any folder."""
    if spec.model.pretrained is None:
        return spec
    path = f"{PRETRAINED_PREFIX}{model_folder(spec.model.pretrained)}"
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, model=path))


def model_folder(path: Path) -> Path:
    """Return the absolute path of a pretrained model's folder; if there is none, and the path is like a name on the
    hub, that of the model in the hub's cache, where the hub's own client downloads it. Raise UsageError if it cannot.
    """
    folder = path.expanduser().absolute()
    if folder.exists() or HUB_NAME.fullmatch(str(path)) is None:
        return folder
    require_libraries()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    name, flag = str(path), f"--model {PRETRAINED_PREFIX}{path}"
    try:
        cached = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
        pretrained_files(cached)
    except HFValidationError:  # no name of the hub after all: a path with a typing error
        return folder
    except (LocalEntryNotFoundError, UsageError):
        print_status(f"{flag}: no such folder; downloading the model of this name from the Hugging Face hub")
    else:
        return cached
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except GatedRepoError:
        raise UsageError(f"{flag}: the hub gives it only to those who have accepted its licence",
                         hint=f"accept it on the model's page, {name}, and then: hf auth login") from None  # fmt: skip
    except RepositoryNotFoundError:
        raise UsageError(f"{flag}: no such folder, and the hub has no public model of this name",
                         hint="the folder of a model; for a private one: hf auth login") from None  # fmt: skip
    except LocalEntryNotFoundError:
        raise UsageError(f"{flag}: no such folder, and the hub cannot be reached from here",
                         hint=f"where it can: hf download {name} --local-dir FOLDER") from None  # fmt: skip
    except Exception as error:  # those of the client's HTTP library, and of a disk that is full
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{flag}: the hub's client: {reason}") from None
