"""docs/formats.md names what the readers take, all of it and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from cupaged.model.pretokenizers import PRE_TOKENIZERS
from cupaged.model.quants import FORMATS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")


def test_the_page_lists_the_weight_types_with_their_sizes() -> None:
    listed: dict[str, float] = {}
    for names, sizes in re.findall(r"^\| ((?:\w+, )*\w+) \| ([\d., ]+) \|", PAGE, re.M):
        listed |= dict(zip(names.split(", "), map(float, sizes.split(", ")), strict=True))
    assert set(listed) == set(FORMATS)
    for name, bits in listed.items():
        assert abs(8 * FORMATS[name].block_bytes / FORMATS[name].block - bits) < 0.05, name


def test_the_page_lists_the_pre_tokenizers() -> None:
    (names,) = re.findall(r"^default, .*?\.$", PAGE, re.M | re.S)
    assert re.split(r",\s", names.removesuffix(".")) == list(PRE_TOKENIZERS)
