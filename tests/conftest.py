"""Settings for all tests."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: a shared machine may pause any example. The same examples each run: a failure must come back.
settings.register_profile("cupaged", deadline=None, derandomize=True)
settings.load_profile("cupaged")

# A test run started in the background of a script has Ctrl-C ignored, and so would have every process that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def checkout_env() -> dict[str, str]:
    """Environment of a subprocess that shall use this checkout, installed or not."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
