"""Print the shell commands of a Markdown page, in their order."""

import re
import sys
from pathlib import Path

print("\n".join(re.findall(r"^```sh\n(.*?)^```", Path(sys.argv[1]).read_text(), re.DOTALL | re.MULTILINE)))
