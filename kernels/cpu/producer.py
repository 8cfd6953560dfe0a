"""Two operations of a capture put together: what made rows of floats also quantises them for the product that follows.

That is a barrier less, and the floats are still in the cache; and if nobody else reads them they are not written to
memory at all. Run at once, not captured, the two are two operations, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.kernels.cpu.executor import Records
from cupaged.kernels.interface import QUANT_BLOCK


@dataclass(frozen=True, slots=True)
class Producer:
    """An operation that was captured as the `count`-th, and made rows of floats: (address, stride, rows, columns).

    places: which arguments of its record are "out", its stride and its thread stride, and, the precise ones behind
    them, the "records" of the rows as a product's input. gates: it is an activation, right behind the product of what
    it takes, which nobody else does; of so many groups of rows.
    """

    captured: Records
    count: int
    made: tuple[int, int, int, int]
    places: dict[str, int]
    gates: int | None = None

    def last_made(self, captured: Records | None, *rows: int) -> bool:
        """Whether the last operation of a capture was this one, and made these rows."""
        return captured is self.captured and captured.count == self.count and rows == self.made

    def quantise_to(self, records: int, precise: bool) -> None:
        """Let it make the records of its rows, too."""
        self._set(self.places["records"] + precise, records)

    def keep_to_threads(self, rows: int, row_bytes: int) -> None:
        """Let it write no floats but to one row of each thread, at `rows`, over and over: they stay in L1."""
        for name, value in (("out", rows), ("out_stride", 0), ("thread_stride", row_bytes)):
            self._set(self.places[name], value)

    def join_gates(self, dealt: tuple[int, int, int, int]) -> None:
        """Let the product before it do its work, panel by panel, and take it out of the capture. dealt: see
        `operations.chunks_of`, of the gates alone."""
        assert self.gates is not None
        activation, product = self.captured.array[self.count - 1], self.captured.array[self.count - 2]
        columns, kind, records = (int(activation[2 + at]) for at in (2, 3, self.places["records"]))
        chunks, large, large_size, small_size = dealt
        product[1] = chunks * self.gates
        for argument, value in (
            (4, columns), (8, large_size), (12, large), (13, small_size),
            (14, kind + 1), (15, records), (16, columns // QUANT_BLOCK),
        ):  # fmt: skip
            product[2 + argument] = value
        self.captured.count -= 1

    def _set(self, argument: int, value: int) -> None:
        self.captured.array[self.count - 1, 2 + argument] = value
