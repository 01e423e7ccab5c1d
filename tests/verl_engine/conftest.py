"""Tests with the real verl, which `make test-verl` installs into an environment of its own.

The folder is not named verl: the folder of all tests is on the import path, and `import verl` would find it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# verl reads them when it is imported.
os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "cpu_platform,sparse_opt.integrations.verl"
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # verl registers its engines for GPUs alone
os.environ["HF_HUB_OFFLINE"] = "1"
# Also for the processes that tests start: verl imports cpu_platform by name.
sys.path.append(str(Path(__file__).parent))
