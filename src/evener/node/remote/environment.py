"""Judge environment variables: which a launcher or an experiment left over, and which may hold secrets.

A launcher tells its processes their rank, world size and rendezvous by variables. What an earlier experiment exported,
or another launcher set for the session in which evener runs, would reach ranks that evener starts: it is left out.
Variables that may hold secrets, by name or value, are neither copied to the hosts nor shown; the same rule finds
private keys in texts. Standard library only, Python 3.8 or newer, Linux or macOS.
"""

from __future__ import annotations

import re
from typing import Mapping  # noqa: UP035  python 3.8

# Set by torchrun, Slurm, Open MPI, MPICH and Intel MPI, MVAPICH, PMIx, LSF, Flux, and by evener for its own processes.
LAUNCHER_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_|CROSS_)?(RANK|WORLD_SIZE)|ROLE_NAME|NPROC_PER_NODE|NNODES|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_\w+|SLURM_\w+|OMPI_\w+|(PMI|PMIX|MPI|I_MPI|HYDRA|HYDI|MV2|PALS|FLUX|JSM|PRTE)_\w+"
    r"|EVENER_(AGENT|FAILURES|FIRST_RANK|PROGRAM|JOINED|KEY_FILE|RANK_PID|ROSTER|SAYINGS|SCRIPT|WORLD)"
)
# Other values of TORCH_DISTRIBUTED_DEBUG keep ranks from starting: DETAIL wraps process groups, which ends ranks that
# exchange gradients in hooks by SIGSEGV, and hangs if only some hosts set it; an unknown value ends `import torch`.
SAFE_DEBUG_LEVELS = ("OFF", "INFO")
HIDDEN = "(hidden)"
# Whole words of a name, between underscores: TOKENIZERS_PARALLELISM, NCCL_IB_PKEY and MY_KEYBOARD have none of them.
SECRET_WORD = re.compile(
    r"KEYS?|TOKEN|SECRETS?|PASS|PASSWORDS?|PASSWD|PASSPHRASE|PWD?|PAT|CREDENTIALS?|CREDS|AUTH|AUTHORIZATION|PRIVATE"
    r"|COOKIES?|JWT|BEARER"
)
# Ends of a word that is written without underscores: WANDB_APIKEY, HFTOKEN, PGPASSWORD.
SECRET_WORD_ENDS = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|(?:PG|DB|MYSQL|SQL)PASS|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)KEY)$"
)
# Prefixes of the tokens of Hugging Face, GitHub, GitLab, OpenAI, AWS, Google, Slack, npm and PyPI; and JSON web tokens.
TOKEN = re.compile(
    r"(?<![\w-])(?:hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{6,}|hf_[A-Za-z]{20,}|gh[pousr]_\w{6,}|github_pat_\w{6,}"
    r"|glpat-[\w-]{6,}|sk-(?=[\w-]*[A-Z0-9])[\w-]{8,}|A(?:KIA|SIA)[A-Z0-9]{8,}|AIza[\w-]{20,}|xox[a-z]-[\w-]{6,}"
    r"|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]+\.[\w-]+)"
)
URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")  # user:password
PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?(?:-----)?[ \t]*(?:[\r\n]|\\[rn]|\Z)"
    r"|PuTTY-User-Key-File-[0-9]+:|AGE-SECRET-KEY-1"
)
ARGUMENT = re.compile(r"(?<!\S)(-{1,2}[A-Za-z][\w-]*(?:=|\s+)|[A-Za-z_]\w*=)(\S+)")  # --name value, NAME=value


def launcher_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that a launcher has set.

    >>> launcher_variables({"PATH": "/bin", "RANK": "0", "SLURM_NTASKS": "2", "RANKING": "1"})
    ['RANK', 'SLURM_NTASKS']
    """
    return sorted(name for name in environment if LAUNCHER_VARIABLES.fullmatch(name))


def debug_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables for debugging with values that keep ranks from starting or training.

    >>> debug_variables({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}), debug_variables({"TORCH_DISTRIBUTED_DEBUG": "INFO"})
    (['TORCH_DISTRIBUTED_DEBUG'], [])
    """
    level = environment.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    return [] if level.upper() in SAFE_DEBUG_LEVELS else ["TORCH_DISTRIBUTED_DEBUG"]


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a login environment that ranks get."""
    left_out = {*launcher_variables(environment), *debug_variables(environment)}
    return {name: value for name, value in environment.items() if name not in left_out}


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable or option says that its value is a secret.

    >>> [is_secret_name(name) for name in ("HF_PAT", "WANDB_PW", "hf-token", "TOKENIZERS_PARALLELISM", "MY_KEYBOARD")]
    [True, True, True, False, False]
    """
    words = [word.rstrip("0123456789") for word in re.split("[_-]+", name.upper())]
    return any(SECRET_WORD.fullmatch(word) or SECRET_WORD_ENDS.search(word) for word in words)


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether an environment variable may hold a secret, by its name or its value.

    >>> is_secret_variable("HF_ENDPOINT", "https://me:sesame@mirror.lan"), is_secret_variable("NCCL_DEBUG", "INFO")
    (True, False)
    """
    return is_secret_name(name) or any(pattern.search(value) for pattern in (URL_PASSWORD, TOKEN, PRIVATE_KEY))


def hide_secrets(text: str) -> str:
    """Return a command line with passwords of URLs, tokens, and values of secret options and variables hidden.

    >>> hide_secrets("train.py --lr 1 --api-key=k https://me:sesame@lan/x")
    'train.py --lr 1 --api-key=(hidden) https://(hidden)@lan/x'
    """

    def hide_argument(match: re.Match[str]) -> str:
        return match[1] + (HIDDEN if is_secret_name(match[1].strip("-= \t")) else match[2])

    return TOKEN.sub(HIDDEN, URL_PASSWORD.sub(HIDDEN, ARGUMENT.sub(hide_argument, text)))
