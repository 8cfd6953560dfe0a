"""From a step plan to the arrays of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from cupaged.cache import PagedKVCache
from cupaged.device.base import Device
from cupaged.kernels.interface import NO_BLOCK, Array, AttentionPlan
from cupaged.memory import BlockManager
from cupaged.model.config import ModelConfig
from cupaged.model.decoder import ForwardBatch
from cupaged.step_plan import Chunk

ROOM = 4  # blocks that a table may grow by before new plans are made


class StepInputs:
    """Device buffers that a step's metadata go to: always the same ones, so that captured steps find them again."""

    def __init__(self, device: Device, groups: int, max_tokens: int, max_rows: int) -> None:
        self.token_ids = device.empty((max_tokens,), np.int32)
        self.positions = device.empty((max_tokens,), np.int32)
        self.slots = [device.empty((max_tokens,), np.int64) for _ in range(groups)]
        self.logit_rows = device.empty((max_rows,), np.int32)
        self.tables: list[Array] = []  # of the last step, on the host: what its plans were made with


def build_batch(
    chunks: Sequence[Chunk], manager: BlockManager, caches: Sequence[PagedKVCache], config: ModelConfig,
    device: Device, inputs: StepInputs,
) -> ForwardBatch:  # fmt: skip
    """Token ids, positions, slots and attention plans of the chunks, in order; slots must have been prepared."""
    counts = [chunk.count for chunk in chunks]
    starts = [0, *accumulate(counts)]
    contexts = [chunk.start + chunk.count for chunk in chunks]
    ids = np.empty(starts[-1], np.int32)
    positions = np.empty(starts[-1], np.int32)
    for chunk, start, stop in zip(chunks, starts, starts[1:], strict=False):
        ids[start:stop] = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
        positions[start:stop] = range(chunk.start, chunk.start + chunk.count)
    slots, plans = [], []
    inputs.tables.clear()
    uploads: list[tuple[Array, Array]] = []
    for index, (group, cache) in enumerate(zip(config.kv_groups, caches, strict=True)):
        rows: list[int] = []
        for chunk in chunks:
            assert chunk.sequence.tables is not None  # scheduled sequences have tables
            rows += manager.slots(chunk.sequence.tables, index, chunk.start, chunk.start + chunk.count)
        slots.append(inputs.slots[index][: len(rows)])
        uploads.append((np.array(rows, np.int64), slots[-1]))
        tables = table_rows(chunks, index, ROOM if device.unified else 0)
        inputs.tables.append(tables)
        plans.append(device.ops.plan_attention(cache.view, tables, starts, contexts, config.num_heads, group.window))
    wanted = [row for chunk, stop in zip(chunks, starts[1:], strict=True) for row in range(stop - chunk.rows, stop)]
    batch = ForwardBatch(
        token_ids=inputs.token_ids[: len(ids)],
        positions=inputs.positions[: len(ids)],
        slots=slots,
        plans=plans,
        logit_rows=inputs.logit_rows[: len(wanted)],
        max_position=max(contexts) - 1,
        last_plan=_last_plan(chunks, contexts, caches, config, device, inputs) if 0 < len(wanted) < len(ids) else None,
    )
    uploads += [(ids, batch.token_ids), (positions, batch.positions)]
    device.upload_many([*uploads, (np.array(wanted, np.int32), batch.logit_rows)])
    return batch


def _last_plan(
    chunks: Sequence[Chunk], contexts: Sequence[int], caches: Sequence[PagedKVCache], config: ModelConfig,
    device: Device, inputs: StepInputs,
) -> AttentionPlan:  # fmt: skip
    """Attention of the wanted tokens alone, each chunk's last ones, in the last layer."""
    index = config.group_of_layer(config.num_layers - 1)
    some = [place for place, chunk in enumerate(chunks) if chunk.rows]
    starts = [0, *accumulate(chunks[place].rows for place in some)]
    return device.ops.plan_attention(
        caches[index].view, inputs.tables[index][some], starts, [contexts[place] for place in some],
        config.num_heads, config.kv_groups[index].window,
    )  # fmt: skip


def table_rows(chunks: Sequence[Chunk], group: int, room: int = 0) -> Array:
    """The chunks' block tables of a KV group as int32 [S, W], padded with NO_BLOCK: the longest has `room` to grow."""
    refs = [chunk.sequence.tables.tables[group].refs for chunk in chunks if chunk.sequence.tables is not None]
    rows = np.full((len(refs), max(map(len, refs)) + room), NO_BLOCK, np.int32)
    for row, blocks in zip(rows, refs, strict=True):
        row[: len(blocks)] = blocks
    return rows
