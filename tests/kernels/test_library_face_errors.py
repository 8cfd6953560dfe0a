"""The library face given things of the wrong kind: our own error, naming the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged import BlockPool, BlockTable, CupagedError, PagedKVCache, paged_attention, write_kv

CACHE = PagedKVCache(4, 8, 2, 16, 1)
QUERY = np.zeros((1, 2, 16), np.float32)
TABLE = BlockTable(8)
TABLE.append_block(0)


def attend(**changes: Any) -> Any:
    arguments = {"query": QUERY, "cache": CACHE, "layer": 0, "tables": [TABLE], "context_lens": [3]}
    return paged_attention(**(arguments | changes))  # type: ignore[arg-type]


WRONG: dict[str, Callable[[], Any]] = {
    "query: expected a NumPy array, got list": lambda: attend(query=[[[0.0]]]),
    "tables: .* in a list, got one BlockTable": lambda: attend(tables=TABLE),
    "tables: .* got one int": lambda: attend(tables=3),
    "scale: expected a finite number, got 'x'": lambda: attend(scale="x"),
    "soft_cap: .*, got 'x'": lambda: attend(soft_cap="x"),
    "window: .*, got 1.5": lambda: attend(window=1.5),
    "sinks: expected a NumPy array, got list": lambda: attend(sinks=[0.0, 0.0]),
    "cache: expected a PagedKVCache, got ndarray": lambda: attend(cache=QUERY),
    "cache: expected a PagedKVCache, got int": lambda: write_kv(QUERY, QUERY, 0, CACHE, [0]),  # type: ignore[arg-type]
    "layer: 'a' is not in 0..0": lambda: attend(layer="a"),
    "layer: True is not in 0..0": lambda: attend(layer=True),
    "num_blocks is 'x'": lambda: BlockPool("x"),  # type: ignore[arg-type]
    "dtype: 'float64' is not one of": lambda: PagedKVCache(4, dtype=np.float64),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_of_the_wrong_kind_is_named(message: str) -> None:
    with pytest.raises(CupagedError, match=message):
        WRONG[message]()


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "float16"], ids=str)
def test_numpy_types_name_storage_types(dtype: Any) -> None:
    assert PagedKVCache(4, dtype=dtype).dtype == "float16"
