"""Tests with the real verl, which `make test-verl` installs into an environment of its own.

The folder is not named verl: the folder of all tests is on the import path, and `import verl` would find it.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # `cpu_platform`, also for the tests' processes

from verl_launch import ENVIRONMENTS

# In this process, which imports verl to read its configurations; `launch_verl` sets those of the tests' processes.
os.environ.update(ENVIRONMENTS["cpu"])
os.environ["HF_HUB_OFFLINE"] = "1"
