"""What this machine can do: read bandwidth, fused multiply-adds, integer dot products; measured with the same team.

Three tiny kernels of the same kind as the real ones. They are compiled when a benchmark starts (about a second) and are
not part of the runtime's library.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cupaged.kernels.cpu.arrays import address, aligned
from cupaged.kernels.cpu.executor import Team

_CHUNK = 1 << 20  # bytes a chunk reads
_ROUNDS = 20_000
_CHAINS = 14  # independent multiply-adds in flight: latency 4, two a cycle, and some to spare


class Roofs:
    """`read(n)` reads n bytes of a large buffer; `multiply_add(chunks)` does flops() operations a chunk."""

    def __init__(self, team: Team, buffer_bytes: int = 1 << 29) -> None:
        import numpy as np

        self._team = team
        self._buffer = aligned(buffer_bytes, np.uint8)
        self._buffer[:] = 1
        self._at = 0
        self._out = aligned(team.threads * 64, np.float32)
        self._compiled = _compile()
        for name, pointer in self._compiled.items():
            team.library.addresses[name] = pointer[1]

    @property
    def buffer_bytes(self) -> int:
        return int(self._buffer.nbytes)

    def read(self, nbytes: int) -> None:
        """Read about `nbytes`, whole MiB, going round a buffer that no cache holds."""
        chunks = max(1, min(nbytes, self.buffer_bytes // 2) // _CHUNK)
        if self._at + chunks * _CHUNK > self.buffer_bytes:
            self._at = 0
        self._team.launch("roof_read", chunks, address(self._buffer) + self._at, _CHUNK, address(self._out))
        self._at += chunks * _CHUNK

    def multiply_add(self, chunks: int) -> None:
        self._team.launch("roof_fma", chunks, _ROUNDS, address(self._out))

    def dot(self, chunks: int) -> None:
        """Dot products of bytes, the way this processor does them (quant_dot.py, weights of 4 bits)."""
        self._team.launch("roof_dot", chunks, _ROUNDS, address(self._out))

    @staticmethod
    def flops(chunks: int) -> int:
        return chunks * _ROUNDS * _CHAINS * 16 * 2

    @staticmethod
    def dots(chunks: int) -> int:
        """Operations of `dot`: a multiplication and an addition each."""
        return chunks * _ROUNDS * _dot_chains() * 64 * 2


def _dot_chains() -> int:
    """Independent sums of 512 bits: as many as the registers hold, 32 of 512 bits or 16 of 256."""
    from cupaged.kernels.cpu.processor import target

    return _CHAINS if target().wide else 6


@lru_cache
def _compile() -> dict[str, tuple[Any, int]]:
    """name -> (owner to keep alive, address in Numba's native form)."""
    from numba import njit

    from cupaged.kernels.cpu.emit import VI, Emitter, load64, primitive
    from cupaged.kernels.cpu.gemm import KERNEL, OPTIONS
    from cupaged.kernels.cpu.processor import target
    from cupaged.kernels.cpu.quant_dot import PAIRS, WAYS, Sum

    @primitive(3)
    def read(e: Emitter, source: Any, count: Any, out: Any) -> None:
        def body(i: Any, state: list[Any]) -> list[Any]:
            base = e.add(source, e.mul(i, 512))
            return [e.b.fadd(s, e.load_as_float(e.add(base, 64 * j), "float32")) for j, s in enumerate(state)]

        sums = e.loop(count, [e.zero()] * 8, body)
        total = sums[0]
        for s in sums[1:]:
            total = e.b.fadd(total, s)
        e.store(total, out, 4)

    @primitive(2)
    def multiply_add(e: Emitter, count: Any, out: Any) -> None:
        x = e.load_as_float(out, "float32")

        def body(_: Any, state: list[Any]) -> list[Any]:
            return [e.fma(s, x, x) for s in state]

        sums = e.loop(count, [x] * _CHAINS, body)
        total = sums[0]
        for s in sums[1:]:
            total = e.b.fadd(total, s)
        e.store(total, out, 4)

    @primitive(2)
    def dot_products(e: Emitter, count: Any, out: Any) -> None:
        way = WAYS[target().dot]
        weights = way.prepare(e, e.load(out, VI, 4), 4)

        def body(_: Any, state: list[Any]) -> list[Any]:
            sums = [Sum(s) for s in state]
            for total in sums:
                if not way.in_32_bits:
                    total.pairs = e.b.bitcast(total.total, PAIRS)
                way.step(e, total, weights, total.total, 4)  # the sum is the input too, so that none is left out
            return [total.total if total.pairs is None else e.b.bitcast(total.pairs, VI) for total in sums]

        sums = e.loop(count, [e.load(out, VI, 4)] * _dot_chains(), body)
        total = sums[0]
        for s in sums[1:]:
            total = e.b.add(total, s)
        e.store(total, out, 4)

    @njit(KERNEL, **OPTIONS)
    def roof_dot(op, _chunk, thread):  # type: ignore[no-untyped-def]
        dot_products(load64(op + 16), load64(op + 24) + thread * 256)

    @njit(KERNEL, **OPTIONS)
    def roof_read(op, chunk, thread):  # type: ignore[no-untyped-def]
        size = load64(op + 24)
        read(load64(op + 16) + chunk * size, size // 512, load64(op + 32) + thread * 256)

    @njit(KERNEL, **OPTIONS)
    def roof_fma(op, _chunk, thread):  # type: ignore[no-untyped-def]
        multiply_add(load64(op + 16), load64(op + 24) + thread * 256)

    compiled: dict[str, tuple[Any, int]] = {}
    for name, function in (("roof_read", roof_read), ("roof_fma", roof_fma), ("roof_dot", roof_dot)):
        overload: Any = next(iter(function.overloads.values()))
        pointer = overload.library.get_pointer_to_function(overload.fndesc.llvm_func_name)
        compiled[name] = (function, int(pointer))
    return compiled
