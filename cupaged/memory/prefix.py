"""Prefix reuse: which cached blocks hold the K/V of which tokens, as a radix tree over blocks.

The K/V of a position depend on the tokens up to it alone (and on the model, which an index never outlives), so a new
request may use the blocks of any earlier sequence that began with the same tokens. A node of the tree is one **unit**
of tokens and, for each KV group, the blocks that hold it; its place in the tree is all that came before. Tokens are
compared in full, not by a hash that could be made to collide. Sequences of different `salt` share nothing.

Nodes that a running sequence uses cannot go; the others are evicted least recently used first, leaves before parents.
A unit is as many tokens as every group's block size divides (their least common multiple).

In a KV group with a window only the last blocks before a position are needed there. So a node may lack blocks of such a
group (NO_BLOCK): sequences give up what their window has passed, and when room is needed and no leaf can go, blocks of
the group that nobody uses are taken out of nodes that stay. A match ends where every window is whole.

Zheng et al. 2023 ("SGLang", RadixAttention) do this per token; a tree of whole blocks with the last one matched in part
finds as much and keeps frames whole.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from cupaged.errors import BlockError
from cupaged.memory.blockref import NO_BLOCK, Pool, pool_of
from cupaged.memory.pool import BlockPool, FrameState
from cupaged.memory.sequence import GroupSpec, SequenceTables


@dataclass(eq=False, slots=True)
class Node:
    """One unit of tokens behind `parent`'s. blocks[g]: its block references in KV group g, in order; NO_BLOCK where a
    group with a window has none any more."""

    tokens: tuple[int, ...]
    parent: Node | None
    blocks: list[list[int]]
    last_used: int = 0
    alive: bool = True
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    by_first: dict[int, list[Node]] = field(default_factory=dict)  # children by their first token

    def listed(self) -> Iterator[tuple[int, int]]:
        """(KV group, block reference) of the blocks that there are."""
        return ((group, ref) for group, refs in enumerate(self.blocks) for ref in refs if ref != NO_BLOCK)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix: whole units `nodes`, then the first `partial_tokens` of `partial`'s."""

    nodes: tuple[Node, ...] = ()
    partial: Node | None = None
    partial_tokens: int = 0
    unit: int = 1

    @property
    def num_tokens(self) -> int:
        return len(self.nodes) * self.unit + self.partial_tokens


class PrefixIndex:
    """The tree over the device pools of one block manager. Not thread-safe, as the manager is not."""

    def __init__(self, pools: Sequence[BlockPool], groups: Sequence[GroupSpec]) -> None:
        self._pools = tuple(pools)
        self._groups = tuple(groups)
        self._sizes = tuple(spec.block_size for spec in groups)
        self.unit = math.lcm(*self._sizes)
        self._roots: dict[Hashable, Node] = {}
        self._cursors: dict[SequenceTables, tuple[Node, int]] = {}  # where a sequence's next unit goes, how many are in
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap; entries of nodes that have changed since are stale
        self._order = 0
        self._by_block: dict[tuple[int, int], Node] = {}
        self._unseen: list[list[int]] = [[] for _ in groups]  # blocks of windows that nobody used when last looked for
        self.num_nodes = 0  # units in the tree
        for group, pool in enumerate(self._pools):
            pool.reclaim = partial(self.evict, group)
        self.evicted = 0  # units
        self.merged = 0  # blocks that sequences gave up for equal ones of the tree

    # -- finding

    def match(self, tokens: Sequence[int], limit: int, salt: Hashable = None) -> Match:
        """The longest prefix of `tokens`, of at most `limit` tokens, whose K/V are known. Counts as a use of it.

        The last unit may match in part: its first tokens' K/V are as good as a whole unit's, and the caller copies
        the block. Leave at least one token to be computed: its logits are what comes next.
        """
        node = self._roots.get(salt)
        if node is None:
            return Match(unit=self.unit)
        nodes = []
        start = 0
        while start + self.unit <= limit:
            child = node.children.get(tuple(tokens[start : start + self.unit]))
            if child is None:
                break
            nodes.append(child)
            node = child
            start += self.unit
        partial, length = self._best_part(node, tokens[start : min(limit, start + self.unit)])
        path = nodes if partial is None else [*nodes, partial]
        whole, length = divmod(self._whole_windows(path, start + length), self.unit)
        partial = path[whole] if length else None
        for used in path[: whole + (partial is not None)]:
            self._touch(used)
        return Match(tuple(path[:whole]), partial, length, self.unit)

    def _whole_windows(self, path: Sequence[Node], end: int) -> int:
        """The largest length <= `end` of a path's tokens behind which no window lacks a block."""
        while end and (gap := self._gap(path, end)) is not None:
            end = gap
        return end

    def _gap(self, path: Sequence[Node], end: int) -> int | None:
        """Where a block begins that is lacking in the window before `end`, be it empty: the last one is copied."""
        for group, spec in enumerate(self._groups):
            if spec.window is None:
                continue
            size, each = spec.block_size, self.unit // spec.block_size
            first = min(spec.first_seen(end), end - 1) // size
            for index in range((end - 1) // size, first - 1, -1):
                if path[index // each].blocks[group][index % each] == NO_BLOCK:
                    return index * size
        return None

    @staticmethod
    def _best_part(node: Node, rest: Sequence[int]) -> tuple[Node | None, int]:
        best: Node | None = None
        length = 0
        for child in node.by_first.get(rest[0], ()) if len(rest) else ():
            common = 0
            for mine, theirs in zip(rest, child.tokens, strict=False):
                if mine != theirs:
                    break
                common += 1
            if common > length:
                best, length = child, common
        return best, length

    # -- learning

    def insert(self, tokens: Sequence[int], tables: SequenceTables, salt: Hashable = None) -> None:
        """Index the whole units among the stored tokens of a sequence. Call after commit_append: K/V are written then.

        Where the tree has the same tokens already, the sequence goes over to the tree's blocks and frees its own: the
        K/V in them are the same. So a sequence uses every node on its path, windows apart, and what nobody uses can all
        be evicted. Blocks that are not on the device end it, and those that stand under another salt: a block has one
        place.
        """
        stored = tables.num_tokens // self.unit
        node, count = self._cursors.get(tables, (None, 0))
        if node is not None and node.alive and count == stored:
            return  # nothing new, as at most steps of decoding
        if node is None or not node.alive:
            node, count = self._roots.get(salt) or Node((), None, []), 0
        while count < stored:
            key = tuple(tokens[count * self.unit : (count + 1) * self.unit])
            blocks = self._blocks_of(tables, count)
            if blocks is None:
                break
            child = node.children.get(key)
            listed = (self._by_block.get((group, ref)) for group, refs in enumerate(blocks) for ref in refs)
            if any(other is not None and other is not child for other in listed):
                break  # of a sequence with another salt, from which this one was forked
            if child is None:
                if node.parent is None:
                    self._roots[salt] = node
                child = self._add(node, key, blocks)
            else:
                self._go_over(tables, count, blocks, child)
            node, count = child, count + 1
        if node.children or node.parent is not None:  # else it is no root of the tree yet
            self._cursors[tables] = (node, count)

    def _blocks_of(self, tables: SequenceTables, unit: int) -> list[list[int]] | None:
        """The blocks of a sequence's unit, if all of them are on the device and complete, or passed by a window."""
        blocks = []
        for group, (size, pool) in enumerate(zip(self._sizes, self._pools, strict=True)):
            each = self.unit // size
            refs = tables.tables[group].refs[unit * each : (unit + 1) * each]
            for ref in refs:
                if ref == NO_BLOCK and self._groups[group].window is not None:
                    continue
                if ref < 0 or pool_of(ref) is not Pool.DEVICE or pool.state(ref) is not FrameState.READY:
                    return None
            blocks.append(refs)
        return blocks

    def _go_over(self, tables: SequenceTables, unit: int, own: list[list[int]], node: Node) -> None:
        """Have a sequence use a node's blocks instead of its own equal ones; what the node lacks it takes over."""
        for group, (size, pool) in enumerate(zip(self._sizes, self._pools, strict=True)):
            first = unit * (self.unit // size)
            for index, (mine, known) in enumerate(zip(own[group], node.blocks[group], strict=True)):
                if mine in (known, NO_BLOCK):
                    continue
                if known == NO_BLOCK:
                    self._list(node, group, index, mine)
                else:
                    pool.fork(known)
                    pool.free(mine)
                    tables.tables[group].refs[first + index] = known
                    self.merged += 1
        self._touch(node)

    def _add(self, parent: Node, tokens: tuple[int, ...], blocks: list[list[int]]) -> Node:
        node = Node(tokens, parent, [[NO_BLOCK] * len(refs) for refs in blocks])
        parent.children[tokens] = node
        parent.by_first.setdefault(tokens[0], []).append(node)
        for group, refs in enumerate(blocks):
            for index, ref in enumerate(refs):
                if ref != NO_BLOCK:
                    self._list(node, group, index, ref)
        self.num_nodes += 1
        self._touch(node)
        return node

    def _list(self, node: Node, group: int, index: int, ref: int) -> None:
        self._pools[group].keep(ref)
        self._by_block[group, ref] = node
        node.blocks[group][index] = ref

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_used = self._clock
        if not node.children:
            self._push(node)

    def _push(self, node: Node) -> None:
        self._order += 1
        heapq.heappush(self._leaves, (node.last_used, self._order, node))
        if len(self._leaves) > 64 + 2 * len(self._by_block):
            self._leaves = [entry for entry in self._leaves if self._current(entry)]
            heapq.heapify(self._leaves)

    @staticmethod
    def _current(entry: tuple[int, int, Node]) -> bool:
        """Whether a heap entry still speaks of a leaf as it was last used."""
        node = entry[2]
        return node.alive and not node.children and entry[0] == node.last_used

    # -- forgetting

    def evict(self, group: int, wanted: int) -> bool:
        """Free blocks of a group until `wanted` are free; True if so. What a sequence uses stays.

        Blocks that a copy still reads drain first and do not count yet.
        """
        pool = self._pools[group]
        busy = []
        while pool.num_free < wanted and self._leaves:
            entry = heapq.heappop(self._leaves)
            node = entry[2]
            if not self._current(entry):
                continue  # it went, it got children, or it was used since and has a later entry
            if self._in_use(node) and not self._used_in_part(node, group):
                busy.append(entry)
                continue
            self._remove(node)
            self.evicted += 1
        for entry in busy:
            heapq.heappush(self._leaves, entry)
        if self._groups[group].window is not None:
            self._take_out(group, wanted)
        return pool.num_free >= wanted

    def _take_out(self, group: int, wanted: int) -> None:
        """Free blocks that nobody uses of nodes that stay, in a group with a window, until `wanted` are free."""
        pool, unseen = self._pools[group], self._unseen[group]
        looked = False
        while pool.num_free < wanted:
            if not unseen:
                if looked:
                    return
                found = [(node.last_used, ref) for (g, ref), node in self._by_block.items() if g == group]
                unseen += [ref for _, ref in sorted(found, reverse=True) if not pool.count(ref)]
                looked = True
                continue
            ref = unseen.pop()
            node = self._by_block.get((group, ref))
            if node is not None and not pool.count(ref):
                refs = node.blocks[group]
                refs[refs.index(ref)] = NO_BLOCK
                del self._by_block[group, ref]
                pool.forget(ref)
                self.evicted += 1

    def _used_in_part(self, node: Node, group: int) -> bool:
        """Whether a match that ended within a unit uses only the first of its blocks in a group without a window."""
        refs = node.blocks[group] if self._groups[group].window is None else ()
        return any(not self._pools[group].count(ref) for ref in refs)

    def _in_use(self, node: Node) -> bool:
        return any(self._pools[group].count(ref) > 0 for group, ref in node.listed())

    def _remove(self, node: Node) -> None:
        """Take a leaf out of the tree; its parent may become one."""
        parent = node.parent
        assert parent is not None and not node.children
        node.alive = False
        del parent.children[node.tokens]
        siblings = parent.by_first[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.by_first[node.tokens[0]]
        for group, ref in node.listed():
            del self._by_block[group, ref]
            self._pools[group].forget(ref)
        self.num_nodes -= 1
        if not parent.children:
            if parent.parent is not None:
                self._push(parent)
            else:
                self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}
                parent.alive = False

    def discard(self, group: int, refs: Sequence[int]) -> None:
        """Forget blocks that are about to move or change, with all that builds on them. Others are ignored."""
        for ref in refs:
            node = self._by_block.get((group, ref))
            if node is not None:
                for below in list(_leaves_first(node)):
                    self._remove(below)

    def forget_sequence(self, tables: SequenceTables) -> None:
        """A sequence is freed: nothing more of it will be indexed; what is stays."""
        self._cursors.pop(tables, None)

    def clear(self) -> None:
        """Forget everything: blocks that nobody uses become free."""
        for root in list(self._roots.values()):
            for node in [node for child in list(root.children.values()) for node in _leaves_first(child)]:
                self._remove(node)
        self._cursors.clear()
        self._leaves.clear()

    # -- checking

    def audit(self) -> None:
        """BlockError names the first node whose blocks are not kept, or that the maps do not agree on. O(nodes)."""
        seen = nodes = 0
        for root in self._roots.values():
            for node in [node for child in root.children.values() for node in _leaves_first(child)]:
                if not node.alive or len(node.tokens) != self.unit:
                    raise BlockError(f"prefix index: a node of {len(node.tokens)} tokens, alive: {node.alive}")
                if node.parent is None or node.parent.children.get(node.tokens) is not node:
                    raise BlockError("prefix index: a node is not its parent's child")
                if node not in node.parent.by_first.get(node.tokens[0], ()):
                    raise BlockError("prefix index: a node is not found by its first token")
                nodes += 1
                if any(NO_BLOCK in node.blocks[g] for g, spec in enumerate(self._groups) if spec.window is None):
                    raise BlockError("prefix index: a node lacks a block of a group without a window")
                for group, ref in node.listed():
                    seen += 1
                    kept = self._by_block.get((group, ref)) is node
                    if not kept or self._pools[group].state(ref) is not FrameState.READY:
                        raise BlockError(f"prefix index: block {ref} of group {group} is not kept and ready")
        if nodes != self.num_nodes:
            raise BlockError(f"prefix index: {nodes} nodes, counted {self.num_nodes}")
        if seen != len(self._by_block):
            raise BlockError(f"prefix index: {len(self._by_block)} blocks listed, {seen} in the tree")
        for group, pool in enumerate(self._pools):
            cached = sum(1 for g, ref in self._by_block if g == group and not pool.count(ref))
            if cached != pool.num_cached:
                raise BlockError(f"prefix index: {cached} unused blocks in group {group}, cached {pool.num_cached}")


def _leaves_first(node: Node) -> Iterator[Node]:
    """A subtree, children before their parents. No recursion: a tree is as deep as a context is long."""
    order, stack = [], [node]
    while stack:
        order.append(stack.pop())
        stack.extend(order[-1].children.values())
    yield from reversed(order)
