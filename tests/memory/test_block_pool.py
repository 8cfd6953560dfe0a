"""BlockPool: counts, reuse order, pins, kept blocks; wrong calls change nothing."""

import pytest

from cupaged.errors import BlockError, OptionError, OutOfBlocks
from cupaged.memory import MAX_FRAMES, NO_BLOCK, BlockPool, BlockTable, Format, FrameState, Pool, make_ref


def contents(pool: BlockPool) -> dict[str, object]:
    """Everything a pool remembers, as a value."""
    return {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(pool).items()}


@pytest.mark.parametrize("num_blocks", [0, -1, MAX_FRAMES + 1])
def test_size_out_of_range(num_blocks: int) -> None:
    with pytest.raises(OptionError, match=f"num_blocks is {num_blocks}"):
        BlockPool(num_blocks)


def test_reuse_order_is_last_freed_first() -> None:
    pool = BlockPool(6)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    pool.free([1, 3])
    assert pool.allocate_many(4) == [3, 1, 4, 5]


def test_references_of_a_host_pool() -> None:
    pool = BlockPool(2, Pool.PINNED_HOST, group=1)
    ref = pool.allocate()
    assert ref == make_ref(0, Pool.PINNED_HOST)
    with pytest.raises(BlockError, match="not of the pinned_host pool of group 1"):
        pool.free(0)
    pool.free(ref)
    assert pool.num_free == 2


def test_allocate_many_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate()
    before = contents(pool)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate_many(3)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert contents(pool) == before
    assert len(pool.allocate_many(2)) == 2
    assert pool.allocate_many(0) == []
    with pytest.raises(OptionError, match="-1 blocks"):
        pool.allocate_many(-1)


def test_A02_allocate_is_one_fork_adds_free_takes_and_drain_frees_all() -> None:
    pool = BlockPool(4)
    ref = pool.allocate()
    assert pool.count(ref) == 1
    pool.fork(ref)
    assert pool.count(ref) == 2
    pool.free(ref)
    assert (pool.count(ref), pool.num_used) == (1, 1)
    pool.free(ref)
    assert (pool.count(ref), pool.num_free, pool.num_used) == (0, 4, 0)
    with pytest.raises(BlockError, match="double free"):
        pool.free(ref)
    pool.audit()


def test_A02_a_table_that_lists_a_block_twice_counts_it_once() -> None:
    pool, table = BlockPool(4), BlockTable(block_size=16)
    first, second = pool.allocate_many(2)
    for ref in (first, second, first):
        table.append_block(ref)
    table.refs.insert(0, NO_BLOCK)
    pool.fork(table.refs)
    assert (pool.count(first), pool.count(second)) == (2, 2)
    pool.free(table.refs)
    assert (pool.count(first), pool.count(second)) == (1, 1)
    pool.free(table.refs)
    assert pool.num_free == 4
    with pytest.raises(BlockError, match="double free"):
        pool.free(table.refs)
    pool.audit()


def test_shared_counts_blocks_not_references() -> None:
    pool = BlockPool(4)
    refs = pool.allocate_many(2)
    for _ in range(3):
        pool.fork(refs[0])
    assert pool.stats().shared == 1
    for _ in range(3):
        pool.free(refs[0])
    assert pool.stats().shared == 0
    pool.audit()


FOREIGN = [NO_BLOCK, 3, make_ref(0, Pool.PINNED_HOST), make_ref(0, format=Format.PACKED), 2**31]


@pytest.mark.parametrize("bad", [*FOREIGN, 2])  # 2 is of the pool, and free
@pytest.mark.parametrize("verb", ["fork", "free", "pin", "unpin", "mark_ready", "keep", "forget"])
def test_wrong_references_change_nothing(verb: str, bad: int) -> None:
    pool = BlockPool(3)
    pool.allocate_many(2)
    before = contents(pool)
    with pytest.raises(BlockError):
        getattr(pool, verb)(bad)
    if verb in ("fork", "free") and bad != NO_BLOCK:
        with pytest.raises(BlockError):
            getattr(pool, verb)([0, 1, bad])  # not even the good ones
    assert contents(pool) == before
    pool.audit()


@pytest.mark.parametrize("ask", ["count", "pins", "state"])
@pytest.mark.parametrize("bad", FOREIGN)
def test_foreign_references_have_no_properties(ask: str, bad: int) -> None:
    with pytest.raises(BlockError, match="not of the device pool of group 0"):
        getattr(BlockPool(3), ask)(bad)


def test_a_pinned_block_drains_before_reuse() -> None:
    pool = BlockPool(1)
    ref = pool.allocate()
    pool.pin(ref)
    pool.pin(ref)
    pool.free(ref)
    assert pool.state(ref) is FrameState.DRAINING
    assert pool.stats().draining == pool.num_used == 1
    pool.audit()
    for wrong in (pool.free, pool.fork, pool.pin):
        with pytest.raises(BlockError):
            wrong(ref)
    pool.unpin(ref)
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.unpin(ref)
    assert pool.state(ref) is FrameState.FREE
    assert pool.allocate() == ref
    assert pool.state(ref) is FrameState.FILLING
    pool.audit()


def test_unpinning_a_block_in_use_leaves_it_in_use() -> None:
    pool = BlockPool(2)
    ref = pool.allocate()
    pool.pin(ref)
    pool.unpin(ref)
    assert (pool.count(ref), pool.num_free) == (1, 1)
    with pytest.raises(BlockError, match="not pinned"):
        pool.unpin(ref)


def test_kept_blocks_are_cached_at_count_zero_and_come_back() -> None:
    pool = BlockPool(3)
    ref = pool.allocate()
    with pytest.raises(BlockError, match="cannot be kept"):
        pool.keep(ref)  # not yet written
    pool.mark_ready(ref)
    pool.keep(ref)
    pool.free(ref)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 1, 0)
    assert pool.state(ref) is FrameState.READY
    pool.audit()
    assert ref not in pool.allocate_many(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate()  # a cached block is its index's to give up
    with pytest.raises(BlockError, match="double free"):
        pool.free(ref)
    pool.fork(ref)
    assert (pool.count(ref), pool.num_cached) == (1, 0)
    pool.free(ref)
    pool.audit()
    pool.forget(ref)
    assert (pool.num_free, pool.num_cached) == (1, 0)
    assert pool.allocate() == ref
    pool.audit()


def test_forgetting_a_block_in_use_or_pinned() -> None:
    pool = BlockPool(2)
    used, pinned = pool.allocate_many(2)
    for ref in (used, pinned):
        pool.mark_ready(ref)
        pool.keep(ref)
    pool.forget(used)
    assert pool.count(used) == 1
    pool.pin(pinned)
    pool.free([used, pinned])
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.forget(pinned)
    assert pool.state(pinned) is FrameState.DRAINING
    pool.audit()
    pool.unpin(pinned)
    assert pool.num_free == 2
    pool.audit()


def damaged(damage: str) -> BlockPool:
    """A pool with one internal value spoilt: frame 0 in use, 1 shared, 2 cached, 3 draining, 4 free."""
    pool = BlockPool(5)
    refs = pool.allocate_many(4)
    pool.fork(refs[1])
    pool.mark_ready(refs[2])
    pool.keep(refs[2])
    pool.pin(refs[3])
    pool.free(refs[2:])
    pool.audit()
    exec(damage, {"pool": pool, "FrameState": FrameState})
    return pool


@pytest.mark.parametrize(
    "damage",
    [
        "pool._free.append(4)",
        "pool._free.append(0)",
        "pool._free.append(2)",
        "pool._free.append(3)",
        "pool._free.pop()",
        "pool._counts[0] = 0",
        "pool._counts[4] = 1",
        "pool._counts[3] = -1",
        "pool._counts[1] = 1",
        "pool._pins[3] = 0",
        "pool._pins[4] = 1",
        "pool._states[0] = FrameState.FREE",
        "pool._states[2] = FrameState.FILLING",
        "pool._kept.clear()",
        "pool._num_cached = 2",
        "pool._num_shared = 0",
        "pool._num_draining = 0",
    ],
)
def test_audit_sees_damage(damage: str) -> None:
    with pytest.raises(BlockError):
        damaged(damage).audit()
