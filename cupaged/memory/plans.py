"""Plan items: what the device must do to blocks, as data.

The block manager never touches arrays. It returns plan items; the engine hands them to the device and reports each
ticket to `BlockManager.complete`. Rules for whoever executes them:

* Items take effect in ticket order, each before the first write or read of its destination by a step.
* Until an item's ticket is completed, the manager hands out neither of its ends anew, whoever frees them. So among
  unfinished items destinations are distinct, and a source may be read late.
* Where a step prepares all its sequences before it commits any, no source in its plan is a destination in it: the plan
  is one call of `copy_blocks` per KV group.
* While a copy of a block is unfinished, the block's last user may write into it behind the tokens that it held when the
  item was made; those slots mean nothing in the copy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanItem:
    """Move the contents of one block. `source` and `destination` are block references in KV group `group`.

    Tickets are unique within a manager and ascend in the order in which items were made.
    """

    ticket: int
    group: int
    source: int
    destination: int


class CopyBlock(PlanItem):
    """Copy on write: device frame to device frame, all layers of the group."""

    __slots__ = ()


class SwapOut(PlanItem):
    """Device frame to pinned host frame."""

    __slots__ = ()


class SwapIn(PlanItem):
    """Pinned host frame to device frame."""

    __slots__ = ()


class PackBlock(PlanItem):
    """Plain block to packed block, of the same pool or another."""

    __slots__ = ()
