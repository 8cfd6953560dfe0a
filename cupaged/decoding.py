"""Decoding goes on: a step of the same sequences, each one token longer, without putting a batch together anew.

Most steps are like this, and between two of them the host's work is all that keeps the device waiting. What changes is
little: a token, its position and its slot a sequence, at times a block of its table; the captured step stays, and its
attention plans are moved on (`MovingCapture.advance`). Whatever else has happened (another sequence, a token that was
not accepted, blocks that moved, a step with prompts in between) is noticed, and the batch is made by `build_batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupaged.batch import StepInputs
from cupaged.device.base import Device, MovingCapture
from cupaged.kernels.interface import Array
from cupaged.memory import BlockManager
from cupaged.request import Sequence as TokenSequence
from cupaged.step_plan import Chunk


@dataclass(slots=True)
class Row:
    """A sequence that decodes: the position it computed last, and of each KV group its slot and its table then."""

    sequence: TokenSequence
    position: int
    slots: list[int]
    refs: list[list[int]]


class DecodingRun:
    """A step of decoding that was just run, and is brought on as long as the next ones continue it."""

    def __init__(
        self, chunks: Sequence[Chunk], step: MovingCapture, manager: BlockManager, device: Device, inputs: StepInputs
    ) -> None:
        self._step = step
        self._manager = manager
        self._device = device
        self._inputs = inputs
        self._tables = list(inputs.tables)
        self._groups = range(len(self._tables))
        self._sizes = [group.block_size for group in manager.groups]
        self._rows = [self._row(chunk) for chunk in chunks]

    def _row(self, chunk: Chunk) -> Row:
        tables, start = chunk.sequence.tables, chunk.start
        assert tables is not None  # it has just been computed
        slots = [self._manager.slots(tables, group, start, start + 1)[0] for group in self._groups]
        return Row(chunk.sequence, start, slots, [list(table.refs) for table in tables.tables])

    def follows(self, chunks: Sequence[Chunk]) -> bool:
        """Whether these are the same sequences, in the same order, each with the next token alone."""
        return len(chunks) == len(self._rows) and all(
            chunk.sequence is row.sequence and chunk.start == row.position + 1 and chunk.count == chunk.rows == 1
            for chunk, row in zip(chunks, self._rows, strict=True)
        )

    def advance(self) -> bool:
        """Bring buffers and plans to the next token of all. False: that cannot be, and this run is of no more use."""
        changed = [False] * len(self._tables)
        for index, row in enumerate(self._rows):
            tables = row.sequence.tables
            if tables is None:
                return False
            row.position += 1
            for group in self._groups:
                refs, known = tables.tables[group].refs, row.refs[group]
                same = refs == known
                if not same:
                    if not self._take_over(group, index, refs):
                        return False
                    row.refs[group] = list(refs)
                    changed[group] = True
                if same and row.position % self._sizes[group]:
                    row.slots[group] += 1
                else:
                    row.slots[group] = self._manager.slots(tables, group, row.position, row.position + 1)[0]
        if not self._step.advance(changed):
            return False
        self._upload()
        return True

    def _take_over(self, group: int, index: int, refs: list[int]) -> bool:
        """Other entries into a table's row, if they fit and are blocks on the device."""
        line = self._tables[group][index]
        if len(refs) > len(line) or max(refs) >= self._manager.pools[group].num_blocks:
            return False
        line[: len(refs)] = refs
        return len(refs) >= len(self._rows[index].refs[group])

    def _upload(self) -> None:
        inputs, upload, count = self._inputs, self._device.upload, len(self._rows)
        upload(np.array([row.sequence.tokens[row.position] for row in self._rows], np.int32), inputs.token_ids[:count])
        upload(np.array([row.position for row in self._rows], np.int32), inputs.positions[:count])
        for group in self._groups:
            slots: Array = np.array([row.slots[group] for row in self._rows], np.int64)
            upload(slots, inputs.slots[group][:count])
