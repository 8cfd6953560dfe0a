"""Blocks taken ahead: a sequence that is expected to go on takes a few at once, while there are plenty.

They are the first to go back: before anybody is stopped for lack of blocks, and before a waiting request is told that
there is no room. Those that hold no token when their sequence ends, or when they go back, were taken in vain.
"""

from __future__ import annotations

from collections.abc import Callable

from cupaged.foresight import Foresight
from cupaged.memory import BlockManager, blocks_for
from cupaged.request import Sequence

AT_ONCE = 4  # blocks of each KV group
SLACK = 4  # one part in so many of a pool stays free


class Ahead:
    """Takes blocks ahead and gives them back. Counts in blocks: `taken` ahead, of these `in_vain`; and `vain_steps`,
    those in vain times the steps that they were held."""

    def __init__(self, manager: BlockManager, foresight: Foresight) -> None:
        self.manager = manager
        self.foresight = foresight
        self.taken = 0
        self.in_vain = 0
        self.vain_steps = 0
        self._since: dict[Sequence, int] = {}  # the step in which a sequence took blocks last

    def extend(self, sequence: Sequence, step: int, promised: Callable[[int], int]) -> None:
        """For a sequence whose next token is prepared: further blocks, if it will need them and they are there.

        promised: blocks of a KV group that running requests need next.
        """
        request, tables = sequence.request, sequence.tables
        if tables is None or len(request.sequences) > 1 or request.params.beam_width is not None:
            return
        if not self.foresight.predictor.ready:
            return
        prepared = tables.num_prepared - tables.num_tokens
        size = max(spec.block_size for spec in self.manager.groups)
        wanted = min(self.foresight.remaining(sequence), request.max_total - 1 - tables.num_tokens, AT_ONCE * size)
        wanted = min(wanted, self.manager.longest_sequence - tables.num_tokens)
        if wanted <= prepared:
            return
        needed = self.manager.blocks_needed(tables, wanted)
        for group, (need, pool) in enumerate(zip(needed, self.manager.pools, strict=True)):
            if (
                pool.num_free - need - promised(group) < pool.num_blocks // SLACK
            ):  # cached blocks are worth more than those to come
                return
        if any(needed):
            self.manager.prepare_append(tables, wanted)
            self.manager.commit_append(tables, 0)
            self.manager.prepare_append(tables, prepared)  # what this step writes; the blocks stay
            self.taken += sum(needed)
            self._since[sequence] = step

    def give_back(self, step: int) -> bool:
        """All blocks that were taken ahead and are not written to in this step. False if there are none."""
        found = False
        for sequence, since in self._since.items():
            tables = sequence.tables
            if tables is None:
                continue
            prepared = tables.num_prepared - tables.num_tokens
            before = self._all_unused(sequence)
            self.manager.trim(tables)
            if prepared:
                self.manager.prepare_append(tables, prepared)
            self._count(before, step - since)
            found |= before > 0
        self._since.clear()
        return found

    def ended(self, sequence: Sequence, step: int) -> None:
        """A sequence is about to lose its blocks."""
        since = self._since.pop(sequence, None)
        if since is not None:
            self._count(self._all_unused(sequence), step - since)

    def share_in_vain(self, steps: int) -> float:
        """Of all blocks of the device, the part that was held in vain, averaged over so many steps."""
        return self.vain_steps / max(1, steps * sum(pool.num_blocks for pool in self.manager.pools))

    def _count(self, blocks: int, steps: int) -> None:
        self.in_vain += blocks
        self.vain_steps += blocks * steps

    def unused(self, group: int) -> int:
        """Blocks of a KV group that would go back."""
        return sum(self._unused(sequence, group) for sequence in self._since)

    def _all_unused(self, sequence: Sequence) -> int:
        return sum(self._unused(sequence, group) for group in range(len(self.manager.groups)))

    def _unused(self, sequence: Sequence, group: int) -> int:
        """Blocks without a token that this step does not write to."""
        if sequence.tables is None:
            return 0
        table = sequence.tables.tables[group]
        return table.num_blocks - blocks_for(sequence.tables.num_prepared, table.block_size)
