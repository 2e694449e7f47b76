"""Load what transformers and peft make of a model's folder. Nothing is downloaded, unpickled or executed from it."""

from __future__ import annotations

import json
import logging as standard_logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.core.base.errors import UsageError
from evener.core.model.pretrained import Quantization, require_libraries


def _prepare_import() -> None:
    """Check that the libraries are installed; keep transformers from asking the network, and from showing progress."""
    require_libraries()
    os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported: all files are local
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # It warns that faster kernels are not installed.
    standard_logging.getLogger("bitsandbytes").setLevel(standard_logging.ERROR)


def load_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a model; UsageError if it has none that gives the place of each token."""
    _prepare_import()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing more special for a damaged file
        raise UsageError(f"--model hf:{folder}: transformers cannot load its tokenizer: {_first_line(error)}") from None
    if not tokenizer.is_fast:
        raise UsageError(f"--model hf:{folder}: its tokenizer does not say which characters a token stands for")
    return tokenizer


def load_model(folder: Path, dtype: torch.dtype = torch.float32, quantization: Quantization = "off") -> Any:
    """Return the causal language model of a folder, with dropout off. UsageError if there is none.

    With `quantization` the linear layers but the head are bitsandbytes', and compute in `dtype`. They are quantized on
    the processor, so that their bits are the same on all ranks.
    """
    _prepare_import()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = _without_dropout(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True, **_quantized(quantization, dtype),
        )  # fmt: skip
    except Exception as error:  # so is a damaged safetensors file
        raise UsageError(f"--model hf:{folder}: transformers cannot load it: {_first_line(error)}") from None
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"--model hf:{folder}: its files lack {missing[0]} and {len(missing) - 1} other weights of a causal "
            "language model",
            hint="a model with a head that predicts the next token",
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _quantized(quantization: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """Return what tells transformers to quantize a model while it is loaded, tensor by tensor."""
    from transformers import BitsAndBytesConfig

    if quantization == "off":
        return {}
    if quantization == "nf4":  # QLoRA's: the scales of the blocks are quantized, too   [Dettmers et al. 2023]
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                    bnb_4bit_compute_dtype=dtype)  # fmt: skip
    else:  # no columns of activations apart: which ones are depends on the other samples of the micro-batch
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return {"quantization_config": config, "device_map": {"": "cpu"}}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_random_model(config: str, dtype: torch.dtype) -> Any:
    """Return the causal language model of a config.json with random weights, with dropout off."""
    _prepare_import()
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads(config)
    try:
        known = _without_dropout(AutoConfig.for_model(values.pop("model_type"), **values))
        return AutoModelForCausalLM.from_config(known, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # as for a folder
        raise UsageError(f"transformers cannot build the model of this config.json: {_first_line(error)}") from None


def _without_dropout(config: Any) -> Any:
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
            setattr(config, name, 0.0)
    return config
