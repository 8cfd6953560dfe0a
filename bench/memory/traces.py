"""Request lengths to simulate: two distributions with stated parameters, or a user's CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupaged.errors import OptionError, shown
from cupaged.model.regular_file import read_regular

MAX_CSV_BYTES = 256 << 20
SHORTEST = 4  # tokens; the source's benchmark drops shorter prompts and answers


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a request's prompt and of its output, 1 or more each."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Distribution:
    """Two independent log-normal lengths, cut to SHORTEST .. longest_prompt, and to max_len in all.

    The means are those that Kwon et al. 2023 report for the data set (figure 11). The spreads (standard deviations of
    the logarithm) are assumptions of ours: the source prints histograms, no figures.
    """

    name: str
    mean_prompt: float
    sigma_prompt: float
    longest_prompt: int
    mean_output: float
    sigma_output: float

    def describe(self, max_len: int) -> str:
        return (
            f"{self.name}: prompt log-normal, mean {self.mean_prompt:g}, sigma {self.sigma_prompt:g}, "
            f"{SHORTEST} to {min(self.longest_prompt, max_len - SHORTEST)}; output log-normal, "
            f"mean {self.mean_output:g}, sigma {self.sigma_output:g}, {SHORTEST} to {max_len} less the prompt"
        )


DISTRIBUTIONS = {
    d.name: d
    for d in (
        Distribution("sharegpt-like", 161.31, 1.2, 1024, 337.99, 0.85),
        Distribution("alpaca-like", 19.31, 0.6, 1024, 58.45, 0.85),
    )
}


def draw(distribution: Distribution, count: int, max_len: int, seed: int) -> list[Lengths]:
    """`count` requests. The same seed gives the same trace."""
    rng = np.random.default_rng(seed)
    prompts = _cut_log_normal(
        rng.standard_normal(count), distribution.mean_prompt, distribution.sigma_prompt,
        min(distribution.longest_prompt, max_len - SHORTEST),
    )  # fmt: skip
    outputs = _cut_log_normal(
        rng.standard_normal(count), distribution.mean_output, distribution.sigma_output, max_len - SHORTEST
    )
    return [Lengths(p, min(o, max_len - p)) for p, o in zip(prompts, outputs, strict=True)]


def _cut_log_normal(normal: np.ndarray, mean: float, sigma: float, longest: int) -> list[int]:
    """Whole numbers SHORTEST .. longest whose expectation is `mean`, cut included (nearest, if `longest` is too small).

    The median is found by bisection on the expectation over a grid of quantiles.
    """
    # Midpoints of 4096 equal parts of the unit interval; the normal quantile by bisection of math.erf.
    grid = np.array([_normal_quantile((i + 0.5) / 4096) for i in range(4096)])
    low, high = math.log(SHORTEST), math.log(longest)
    for _ in range(60):
        middle = (low + high) / 2
        if np.clip(np.exp(middle + sigma * grid), SHORTEST, longest).mean() < mean:
            low = middle
        else:
            high = middle
    return [int(x) for x in np.clip(np.rint(np.exp(low + sigma * normal)), SHORTEST, longest)]


def _normal_quantile(p: float) -> float:
    low, high = -8.0, 8.0
    for _ in range(50):
        middle = (low + high) / 2
        if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < p:
            low = middle
        else:
            high = middle
    return low


def read_csv(path: Path, max_len: int) -> list[Lengths]:
    """Requests of a CSV file whose header names the columns `prompt` and `output` (others are ignored), in order.

    OptionError names the file, the line and what is allowed.
    """
    try:
        text = read_regular(path, MAX_CSV_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise OptionError(f"{path}: not text in UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"cannot read {shown(str(path))} ({reason})") from None
    requests = list(_rows(path, text, max_len))
    if not requests:
        raise OptionError(f"{path}: no request in it")
    return requests


def _rows(path: Path, text: str, max_len: int) -> Iterator[Lengths]:
    reader = csv.reader(io.StringIO(text))
    try:
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in ("prompt", "output") if header.count(name) != 1]
        if missing:
            raise OptionError(f"{path}: the first line must name the columns prompt and output, once each")
        columns = header.index("prompt"), header.index("output")
        for row in reader:
            if not row:
                continue
            values = []
            for column in columns:
                cell = row[column].strip() if column < len(row) else ""
                value = int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 10 else 0
                if value < 1:
                    raise OptionError(
                        f"{path}: line {reader.line_num}: {header[column]} is {shown(cell)}; a whole number of tokens "
                        "from 1 on is allowed"
                    )
                values.append(value)
            lengths = Lengths(*values)
            if lengths.total > max_len:
                raise OptionError(
                    f"{path}: line {reader.line_num}: {lengths.total} tokens in all, at most {max_len} fit (--max-len)"
                )
            yield lengths
    except csv.Error as error:
        raise OptionError(f"{path}: line {reader.line_num}: {error}") from None
