"""A binary buddy allocator (Knowlton 1965), the contiguous baseline's: sizes are powers of two.

Memory of any size is cut into the largest powers of two that fit, from address 0 on, so that every piece is aligned to
its own size and its buddy is at address XOR size.
"""

from __future__ import annotations

from cupaged.errors import OptionError


class Buddy:
    """Units 0 .. size - 1. `allocate` gives the lowest-addressed of the smallest free pieces that suffice."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise OptionError(f"a buddy allocator of {size} units: 1 or more are allowed")
        self.size = size
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(size.bit_length())}
        self._allocated: dict[int, int] = {}
        self._limit: dict[int, int] = {}  # address of each top piece: its size; pieces never merge beyond it
        start = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._free[1 << order].add(start)
                self._limit[start] = 1 << order
                start += 1 << order
        self._tops = sorted(self._limit)

    @staticmethod
    def rounded(size: int) -> int:
        """The power of two that `size` units take."""
        return 1 << max(0, size - 1).bit_length()

    @property
    def free_units(self) -> int:
        return sum(size * len(addresses) for size, addresses in self._free.items())

    def allocate(self, size: int) -> int | None:
        """Address of rounded(size) units, or None when no free piece is large enough."""
        wanted = self.rounded(size)
        found = min((piece for piece, addresses in self._free.items() if addresses and piece >= wanted), default=None)
        if found is None:
            return None
        address = min(self._free[found])
        self._free[found].remove(address)
        while found > wanted:
            found //= 2
            self._free[found].add(address + found)
        self._allocated[address] = wanted
        return address

    def free(self, address: int) -> None:
        """Give back a piece and merge it with its buddy as often as that is free. OptionError if it is not taken."""
        size = self._allocated.pop(address, None)
        if size is None:
            raise OptionError(f"unit {address} is not the start of an allocated piece")
        top = max(start for start in self._tops if start <= address)
        while size < self._limit[top]:
            buddy = address ^ size
            if buddy not in self._free[size]:
                break
            self._free[size].remove(buddy)
            address = min(address, buddy)
            size *= 2
        self._free[size].add(address)
