"""Gives golden tests the builder of Hub folders, which lies with the model tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "model"))
