"""Tests with the real verl, which `make test-verl` installs into an environment of its own.

The folder is not named verl: the folder of all tests is on the import path, and `import verl` would find it.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Also for the processes that tests start: verl imports cpu_platform by name.
sys.path.append(str(Path(__file__).parent))
