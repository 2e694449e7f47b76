"""Print the shell commands of Markdown pages, in their order: the blocks that begin with ```sh."""

import re
import sys
from pathlib import Path

for page in sys.argv[1:]:
    blocks = re.findall(r"^```sh\n(.*?)^```", Path(page).read_text(), re.DOTALL | re.MULTILINE)
    if blocks:
        print(f"# {page}", *blocks, sep="\n")
