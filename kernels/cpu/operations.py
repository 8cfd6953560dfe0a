"""`CpuOperations`: the Numba kernels behind the names of `interface.Operations`.

This side only checks dtypes and strides, turns arrays into addresses and hands records to the team; it never touches
data itself, so that a step can be captured and run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupaged.errors import KernelError
from cupaged.kernels.arguments import check_attention
from cupaged.kernels.cpu.arrays import Arena, address, contiguous, float_bits, row_address
from cupaged.kernels.cpu.arrays import aligned as aligned
from cupaged.kernels.cpu.attention_record import (
    FIELDS,
    MERGE_FIELDS,
    heads_together,
    max_rows,
    scratch_bytes,
    state_bytes,
)
from cupaged.kernels.cpu.exact_layout import FEW as EXACT_FEW
from cupaged.kernels.cpu.executor import AttentionCall, Records, Team
from cupaged.kernels.cpu.matrices import PANEL, JoinedMatrix, PackedMatrix, pack, parts_of, plain_outputs
from cupaged.kernels.cpu.plan import CpuAttentionPlan, Planner
from cupaged.kernels.cpu.producer import Producer
from cupaged.kernels.cpu.quant_layout import MB, X_RECORD
from cupaged.kernels.interface import (
    QUANT_BLOCK,
    QUANT_PANEL,
    STORAGE_BYTES,
    Activation,
    Array,
    AttentionPlan,
    KVView,
    Matrix,
    SampleRows,
    WeightSource,
    WeightType,
)
from cupaged.kernels.philox import MASK64

_MATMUL_SCRATCH = (128 + 240) * 64 * 4  # gemm.SCRATCH: importing it would bring Numba along; a test holds them equal
_SAMPLE_BUCKETS = 2048  # sampling.BUCKETS
_SAMPLE_GROUP = 64  # sampling_math.GROUP
_ROWS_A_CHUNK = 240
_FEW = 8  # rows that a product is bound by its weights for
# Words of the attention records that depend on the plan: two before the arguments, which are the fields in order.
_ITEMS, _STATES, _HEADS_A_CHUNK = (2 + FIELDS.index(name) for name in ("items", "states", "heads_a_chunk"))
_MERGES, _MERGE_STATES, _MERGE_KV_HEADS = (
    2 + MERGE_FIELDS.index(name) for name in ("merges", "states", "num_kv_heads")
)
_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
GREEDY_BELOW = 1e-5  # sampling.GREEDY_BELOW
_LOG2E = 1.4426950408889634


class CpuOperations:
    """Operations on NumPy arrays, run by a thread team. Documented in `interface.Operations`."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._arena = Arena()
        self._planners: dict[tuple[int | None, ...], Planner] = {}
        self._producer: Producer | None = None
        # The last product captured that an activation can join: (capture, its length, out, its stride, rows, outputs),
        # and how many groups of rows it has.
        self._gates: tuple[tuple[object, ...], int] | None = None
        self._scratch = {"matmul": aligned(team.threads * _MATMUL_SCRATCH, np.uint8)}

    def _scratch_address(self, name: str, size: int) -> int:
        """A buffer of at least `size` bytes that lives as long as we do; it grows, never shrinks.

        A capture keeps those alive that its records point into: the last ones at its end, outgrown ones here.
        """
        held = self._scratch.get(name)
        if held is None or held.nbytes < size:
            if held is not None:
                self.team.hold(held)
            held = self._scratch[name] = aligned(max(size, 2 * (0 if held is None else held.nbytes)), np.uint8)
        return address(held)

    def keep_alive(self, records: Records) -> None:
        """Tie the present scratch buffers to a captured list."""
        records.keep.extend(self._scratch.values())

    # -- weights

    def matrix(self, source: WeightSource, dtype: WeightType) -> PackedMatrix | JoinedMatrix:
        return pack(self.team, self._arena, source, dtype)

    def vector(self, source: WeightSource) -> Array:
        values = aligned(source.shape[0], np.float32)
        values[:] = source.float32(0, source.shape[0])
        return values

    # -- dense

    def embed(self, ids: Array, table: Matrix, out: Array, scale: float = 1.0) -> None:
        parts = parts_of("table", table)
        if len(parts) != 1:
            raise KernelError("table: its rows are of several types")
        packed = parts[0]
        ids_at, out_at = contiguous("ids", ids, np.int32), contiguous("out", out)
        arguments = (ids_at, packed.address, out_at, packed.cols, float_bits(scale))
        kernel = f"embed_{packed.dtype}" if packed.layout is None else f"quant_embed_{packed.layout}"
        self.team.launch(kernel, len(ids), *arguments)

    def matmul(
        self, x: Array, weight: Matrix, out: Array, bias: Array | None = None, precise: bool = False,
        precise_from: int = 0, x_spent: bool = False,
    ) -> None:  # fmt: skip
        parts = parts_of("weight", weight)
        if x.shape[1] != weight.cols or out.shape != (x.shape[0], weight.rows):
            raise KernelError(f"matmul: {x.shape} by {weight.rows}x{weight.cols} into {out.shape}")
        (x_at, x_stride), (out_at, out_stride) = row_address("x", x), row_address("out", out)
        bias_at = 0 if bias is None else contiguous("bias", bias)
        spans: list[tuple[PackedMatrix, int, int, bool | None]] = []  # part, outputs first..last-1, how precise
        first = 0
        for part in parts:
            plain = plain_outputs(part.rows, precise, precise_from - first)
            if not part.quantises:
                spans.append((part, 0, part.rows, None))
            else:
                spans += [(part, *span) for span in ((0, plain, False), (plain, part.rows, True)) if span[0] < span[1]]
            first += part.rows
        inputs: dict[bool | None, tuple[int, int]] = {None: (x_at, x_stride)}
        for fine in {span[3] for span in spans} - {None}:
            inputs[fine] = self._quantise(x_at, x_stride, x.shape[0], x.shape[1], bool(fine))
        if x_spent and None not in (span[3] for span in spans):
            self._spare_floats(x_at, x_stride, x.shape[0], x.shape[1], inputs.get(True) is None)
        for part, begin, end, fine in spans:
            some = part.outputs(begin, end)
            self._product(some, *inputs[fine], out_at, out_stride, x.shape[0], bias_at, bool(fine))
            out_at += 4 * some.rows
            bias_at += 4 * some.rows if bias is not None else 0

    def _quantise(self, x: int, stride: int, rows: int, cols: int, precise: bool) -> tuple[int, int]:
        """(address, row stride) of the records of a product's input, in scratch: the next product overwrites them."""
        record_bytes = cols // QUANT_BLOCK * X_RECORD * (1 + precise)
        made = self._producer
        if made is not None and not made.last_made(self.team.capturing, x, stride, rows, cols):
            made = None
        name = "precise inputs" if precise else "inputs"
        if made is not None and made.gates is not None and not precise:
            name = "gated inputs"  # made while the product before still reads its own
        records = self._scratch_address(name, rows * record_bytes)
        if made is not None:
            made.quantise_to(records, precise)
        else:
            self._launch_rows("quantise_rows", rows, x, stride, cols, records, precise)
        return records, record_bytes

    def _spare_floats(self, x: int, stride: int, rows: int, cols: int, plain: bool) -> None:
        """Nobody reads these rows of floats any more, their records are made: no need to have them in memory."""
        made = self._producer
        if made is None or not made.last_made(self.team.capturing, x, stride, rows, cols):
            return
        if made.gates is not None and plain:
            made.join_gates(chunks_of(cols // QUANT_PANEL, self.team.threads))
        else:
            row_bytes = -(-4 * cols // 64) * 64
            made.keep_to_threads(self._scratch_address("spare rows", self.team.threads * row_bytes), row_bytes)

    def _note_producer(self, made: tuple[int, int, int, int], gates: int | None = None, **places: int) -> None:
        captured = self.team.capturing
        self._producer = None if captured is None else Producer(captured, captured.count, made, places, gates)

    def _product(
        self, part: PackedMatrix, x: int, x_stride: int, out: int, out_stride: int, count: int, bias: int, precise: bool
    ) -> None:  # fmt: skip
        panel, rows_a_chunk = (QUANT_PANEL, MB) if part.quantises else (PANEL, _ROWS_A_CHUNK)
        panels = -(-part.rows // panel)
        if panels < 8:
            rows_a_chunk = 48
        if precise:
            rows_a_chunk //= 2
        row_groups = -(-count // rows_a_chunk)
        chunks, large, large_size, small_size = chunks_of(panels, self.team.threads)
        if part.exact and part.layout:  # in panels of 32, which go in twos: a single one at the end takes few rows
            if count <= EXACT_FEW:
                chunks, large, large_size, small_size = chunks_of(-(-part.rows // QUANT_PANEL), self.team.threads)
            else:
                large_size, small_size = 2 * large_size, 2 * small_size
        gated: tuple[int, ...] = ()
        if part.quantises:
            kernel = f"quant_matmul_{'precise_' if precise else ''}{part.layout}"
            gated = (0, 0, 0)  # not yet: see `gated_activation`
        else:
            kernel = f"matmul_{part.dtype}" if part.layout is None else f"exact_matmul_{part.layout}"
        self.team.launch(
            kernel, chunks * row_groups,
            part.address, x, out, count, part.rows, part.cols, x_stride, out_stride,
            large_size, rows_a_chunk, self._scratch_address("matmul", 0), bias, large, small_size, *gated,
        )  # fmt: skip
        captured = self.team.capturing
        if captured is not None and gated and not precise and not bias:
            self._gates = (captured, captured.count, out, out_stride, count, part.rows), row_groups

    # -- elementwise

    def _launch_rows(self, name: str, rows: int, *arguments: int) -> None:
        """Rows are taken several at a time, where there are many: memory is read in longer runs."""
        step = max(1, min(16, rows // (4 * self.team.threads)))
        self.team.launch(name, -(-rows // step), *arguments, rows, step)

    def take_rows(self, x: Array, rows: Array, out: Array) -> None:
        arguments = (contiguous("x", x), contiguous("rows", rows, np.int32), contiguous("out", out), out.shape[1])
        self.team.launch("take_rows", len(out), *arguments)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, residual: Array | None = None) -> None:
        (x_at, x_stride), (out_at, out_stride) = row_address("x", x), row_address("out", out)
        residual_at = 0 if residual is None else contiguous("residual", residual)
        arguments = (x_at, contiguous("weight", weight), out_at, x.shape[1], float_bits(eps), residual_at)
        self._launch_rows("rms_norm", x.shape[0], *arguments, x_stride, out_stride, 0, 0, 0)
        self._note_producer((out_at, out_stride, *x.shape), out=2, out_stride=7, records=8, thread_stride=10)

    def head_norm(self, x: Array, weight: Array, eps: float) -> None:
        x_at, stride = row_address("x", x)
        weight_at = contiguous("weight", weight)
        self._launch_rows("head_norm", x.shape[0], x_at, weight_at, x.shape[1], x.shape[2], float_bits(eps), stride)

    def rope(self, x: Array, positions: Array, table: Array) -> None:
        x_at, stride = row_address("x", x)
        tables = (contiguous("positions", positions, np.int32), contiguous("table", table))
        self._launch_rows("rope", x.shape[0], x_at, *tables, x.shape[1], x.shape[2], table.shape[1], stride)

    def gated_activation(self, gate_up: Array, activation: Activation, out: Array, spent: bool = False) -> None:
        gate_at, out_at, (rows, cols) = contiguous("gate_up", gate_up), contiguous("out", out), out.shape
        captured, gates = self.team.capturing, None
        made = (captured, 0 if captured is None else captured.count, gate_at, 8 * cols, rows, 2 * cols)
        # Few rows are bound by the weights, which are read fastest in one run.
        joins = spent and rows > _FEW and activation != "gelu" and cols % QUANT_PANEL == 0
        if joins and self._gates is not None and self._gates[0] == made:
            gates = self._gates[1]
        self._launch_rows("gated_activation", rows, gate_at, out_at, cols, _KINDS[activation], 4 * cols, 0, 0, 0)
        self._note_producer((out_at, 4 * cols, rows, cols), gates, out=1, out_stride=4, records=5, thread_stride=7)

    def add(self, x: Array, y: Array) -> None:
        size = 4096
        self.team.launch("add", -(-x.size // size), contiguous("x", x), contiguous("y", y), size, x.size)

    # -- K/V

    def write_kv(self, key: Array, value: Array, cache: KVView, layer: int, slots: Array) -> None:
        (key_at, key_stride), (value_at, value_stride) = row_address("key", key), row_address("value", value)
        k_row, k_column = _k_strides(cache)
        self._launch_rows(
            f"write_kv_{cache.dtype}", key.shape[0],
            key_at, value_at, key_stride, value_stride, contiguous("slots", slots, np.int64), address(cache.pools[0]),
            cache.num_kv_heads, cache.head_dim, cache.block_size, cache.block_stride, layer * cache.layer_stride,
            cache.kv_stride, cache.head_stride, k_row, k_column,
        )  # fmt: skip

    def copy_blocks(self, cache: KVView, sources: Sequence[int], destinations: Sequence[int]) -> None:
        pairs = np.array([sources, destinations], np.int64).T.copy()
        size = STORAGE_BYTES[cache.dtype]
        run = 2 * cache.kv_stride * size  # K and V of a layer
        runs, run_stride = cache.num_layers, cache.layer_stride * size
        if run_stride == run:  # block-major: all layers at once
            runs, run, run_stride = 1, run * cache.num_layers, 0
        arguments = (address(cache.pools[0]), address(pairs), runs, run, cache.block_stride * size, run_stride)
        self.team.launch("copy_blocks", len(pairs) * runs, *arguments, keep=pairs)

    # -- attention

    def plan_attention(
        self, cache: KVView, tables: Array, query_starts: Sequence[int], context_lens: Sequence[int], num_heads: int,
        window: int | None = None,
    ) -> CpuAttentionPlan:  # fmt: skip
        table, starts, contexts = check_attention(cache, tables, query_starts, context_lens, num_heads, window)
        kv_heads = cache.num_kv_heads
        group = num_heads // kv_heads
        together = heads_together(cache.head_dim, group, kv_heads, STORAGE_BYTES[cache.dtype])
        shape = (group, kv_heads, together, cache.block_size, window, self.team.threads)
        planner = self._planners.get(shape)
        if planner is None:
            planner = self._planners[shape] = Planner(*shape)
        return planner.plan(table, starts, contexts)

    def paged_attention(
        self, query: Array, cache: KVView, layer: int, plan: AttentionPlan, out: Array, scale: float,
        soft_cap: float | None = None, sinks: Array | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(plan, CpuAttentionPlan):
            raise KernelError(f"plan: a {type(plan).__name__} was made by another set of kernels")
        heads, dim = query.shape[1:]
        if query.shape != out.shape or query.shape[0] != plan.num_tokens or dim != cache.head_dim:
            raise KernelError(f"query: shape {query.shape}, for {plan.num_tokens} tokens and out {out.shape}")
        if plan.num_tokens == 0:
            return
        (query_at, query_stride), (out_at, out_stride) = row_address("query", query), row_address("out", out)
        kv_heads = cache.num_kv_heads
        group, rows = heads // kv_heads, max_rows(heads // kv_heads)
        states = self._states(plan, heads, dim)
        scratch_size = scratch_bytes(dim, rows)
        scratch = self._scratch_address("attention", scratch_size * self.team.threads)
        pools = [0 if p is None else address(p) for p in cache.pools] + [0] * (4 - len(cache.pools))
        # Without a soft cap the scale takes log2(e) along, and the softmax works on powers of two.
        factor = scale if soft_cap else scale * _LOG2E
        output = (out_at, out_stride, 0 if sinks is None else contiguous("sinks", sinks))
        self.team.launch(
            f"attention_parts_{cache.dtype}", plan.chunks,
            plan.addresses[0], kv_heads, query_at, query_stride, group, dim, states, scratch, scratch_size,
            *pools, cache.block_size, cache.block_stride, layer * cache.layer_stride, cache.kv_stride,
            cache.head_stride, float_bits(factor), float_bits(soft_cap) if soft_cap else 0, *_k_strides(cache), rows,
            plan.heads_a_chunk, *output, keep=plan,
        )  # fmt: skip
        captured = self.team.capturing
        if captured is not None:
            at = captured.count - 1
            captured.attention.append(AttentionCall(at, at + 1, plan, heads, kv_heads, dim))
        self.team.launch(
            "attention_merge", len(plan.merges) * kv_heads,
            plan.addresses[1], kv_heads, group, dim, states, scratch, scratch_size, *output,
        )  # fmt: skip

    def _states(self, plan: CpuAttentionPlan, heads: int, head_dim: int) -> int:
        return self._scratch_address("states", plan.num_states * heads * state_bytes(head_dim))

    def rebind(self, records: Records, old: Sequence[AttentionPlan], new: Sequence[AttentionPlan]) -> None:
        """Put other attention plans, of as many tokens, into a captured list: the only thing in it that a step changes.

        `old`: the plans it was captured with, or those of the last call; `new` takes their places in order.
        """
        if records.bindings is None:
            calls: dict[tuple[int, int, int], list[AttentionCall]] = {}
            for call in records.attention:
                index = next(i for i, plan in enumerate(old) if plan is call.plan)
                calls.setdefault((index, call.heads, call.head_dim), []).append(call)
            records.bindings = [
                (*key, np.array([call.parts for call in found]), np.array([call.merge for call in found]))
                for key, found in calls.items()
            ]
        words = records.array
        for index, heads, head_dim, parts, merges in records.bindings:
            plan = new[index]
            if not isinstance(plan, CpuAttentionPlan) or plan.num_tokens != old[index].num_tokens:
                raise KernelError("plans: not made for the number of tokens that was captured")
            states = self._states(plan, heads, head_dim)
            kv_heads = int(words[merges[0], _MERGE_KV_HEADS])
            words[parts, 1], words[merges, 1] = plan.chunks, len(plan.merges) * kv_heads
            words[parts, _ITEMS], words[parts, _STATES] = plan.addresses[0], states
            words[parts, _HEADS_A_CHUNK] = plan.heads_a_chunk
            words[merges, _MERGES], words[merges, _MERGE_STATES] = plan.addresses[1], states

    # -- sampling

    def broken_rows(self, logits: Array) -> Array | None:
        count, size = logits.shape
        finite = np.empty(count, np.int64)
        self.team.launch("finite", count, contiguous("logits", logits), size, address(finite))
        return None if finite.all() else finite == 0

    def sample(self, logits: Array, rows: SampleRows, checked: bool = False) -> list[int]:
        count, size = logits.shape
        for name in SampleRows.__slots__:
            if len(getattr(rows, name)) != count:
                raise KernelError(f"rows.{name}: {len(getattr(rows, name))} values for {count} rows of logits")
        # Greedy rows draw no number, and nothing of them is looked at but that they are.
        settings = np.zeros((count, 7), np.float64)
        if max(rows.temperature, default=0.0) >= GREEDY_BELOW:
            for i, column in enumerate((rows.temperature, rows.top_k, rows.top_p, rows.min_p)):
                settings[:, i] = column
            keys = settings.view(np.uint64)
            for i, values in enumerate((rows.seed, rows.sample, rows.position), start=4):
                keys[:, i] = [value & MASK64 for value in values]
        out = np.empty(count, np.int64)
        scratch_bytes = sample_scratch(size)
        scratch = self._scratch_address("sample", scratch_bytes * self.team.threads)
        rows_at = contiguous("logits", logits)
        arguments = (rows_at, size, address(settings), address(out), scratch, scratch_bytes, int(checked))
        self.team.launch("sample", count, *arguments)
        tokens: list[int] = out.tolist()
        return tokens


def chunks_of(panels: int, threads: int) -> tuple[int, int, int, int]:
    """How a product's panels are dealt out: (chunks, large ones, panels of a large one, panels of a small one).

    The large ones come first, one a thread, and are four fifths of all; the rest is cut into as many again, for whoever
    is done. A core's prefetching runs on beyond a chunk, into what another core is reading: with many small chunks two
    threads were slower than one (measured on 345 KB: 30 chunks 15 us, 4 chunks 9 us, one thread 11 us).
    """
    if threads == 1:
        return 1, 1, panels, 1
    large_size = panels * 4 // (5 * threads)
    large = threads if large_size else 0
    rest = panels - large * large_size
    small_size = max(1, -(-rest // threads))
    return large + -(-rest // small_size), large, large_size, small_size


def sample_scratch(size: int) -> int:
    """Bytes of scratch that a thread needs to sample from `size` logits (sampling.py), a multiple of 64."""
    groups = size // _SAMPLE_GROUP + 1
    return -(-(28 * size + _SAMPLE_BUCKETS * 8 + 12 * groups) // 64) * 64


def _k_strides(cache: KVView) -> tuple[int, int]:
    """Elements from one dim, and from one token, to the next inside a block's K."""
    return (cache.block_size, 1) if cache.k_transposed else (1, cache.head_dim)
