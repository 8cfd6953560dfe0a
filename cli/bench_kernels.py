"""`cupaged bench kernels`, `matmul` and `attention`: CPU kernels against this machine's roofs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cupaged.cli import runtime
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress
from cupaged.cli.values import number
from cupaged.errors import OptionError, shown
from cupaged.kernels.interface import PACKED_BLOCK_BYTES, STORAGE_BYTES

if TYPE_CHECKING:
    from cupaged.bench.against import Measurement

_MAX_SIDE = 1 << 17  # rows or columns of a matrix: 8 GiB as float32 at most, together with _MAX_WEIGHTS
_MAX_WEIGHTS = 1 << 31
_MAX_TOKENS = 1 << 20
WEIGHT_TYPES = (*STORAGE_BYTES, *PACKED_BLOCK_BYTES)

_threads = click.option("--threads", type=number(int, 1, 256), help="CPU threads.  [default: the cores we may use]")
_seconds = click.option(
    "--seconds", type=number(float, 0.05, 60), default=0.5, show_default=True, help="Time for each row."
)
_json = click.option("--json", "as_object", is_flag=True, help="A JSON object a row.")


class Table:
    """Rows as they are measured: text in columns, or JSON objects."""

    def __init__(self, as_object: bool) -> None:
        self._output = Output()
        self._as_object = as_object
        if not as_object:
            self._output.write(
                f"{'kernel':9} {'case':65} {'time':>9} {'GB/s':>6} of {'':5} {'GOP/s':>7} of {'':6} share\n"
            )

    def show(self, kernel: str, row: Measurement) -> None:
        if self._as_object:
            self._output.json({"kernel": kernel, **asdict(row), "share": row.share, "bound": row.bound})
            return
        figures = f"{row.gb_s:6.1f} of {row.read_roof:5.1f} {row.gop_s:7.1f} of {row.arithmetic_roof:6.1f}"
        line = f"{kernel:9} {row.case:65} {row.microseconds:6.0f} us {figures} {row.share:5.0%} of {row.bound}"
        self._output.write(line + "\n")


@click.command(short_help="Products and attention of the usual shapes.")
@_threads
@_seconds
@click.option("--only", metavar="KERNEL", type=click.Choice(["matmul", "attention"]), help="Only these rows.")
@_json
@runtime.debug_option
def kernels(threads: int | None, seconds: float, only: str | None, as_object: bool) -> int:
    """The CPU kernels against this machine's roofs: read bandwidth, and arithmetic of their kind.

    Kernel and roofs are run in turn, in the same rounds, and medians are compared; on a machine that is busy with other
    things the shares hold better than the rates. A share over 100% means that something else slowed the roof's rounds;
    but attention over bfloat16 K/V multiplies pairs, which some processors do twice as fast as the float multiply-adds.
    """
    from cupaged.bench.kernels import run_all

    table = Table(as_object)
    with Progress() as progress:
        for kernel, row in run_all(threads, seconds, only, progress):
            progress.clear()
            table.show(kernel, row)
    return 0


class Shape(click.ParamType):
    """OUTxIN, two sides of a matrix."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(\d{1,7})x(\d{1,7})", str(value))
        sides = (int(match[1]), int(match[2])) if match else (0, 0)
        if not all(1 <= side <= _MAX_SIDE for side in sides) or sides[0] * sides[1] > _MAX_WEIGHTS:
            self.fail(
                f"{shown(value)} is not OUTxIN, such as 3072x576: each side 1 .. {_MAX_SIDE}, 2**31 together",
                param,
                ctx,
            )
        return sides


@click.command(short_help="Matrix products: GB/s and GOP/s beside the roofs.")
@click.option("--shape", "shapes", type=Shape(), multiple=True, metavar="OUTxIN",
    help="Of the weights; may be repeated.  [default: the matrices of SmolLM2-135M, and 4096x4096]",
)  # fmt: skip
@click.option("--rows", "counts", type=number(int, 1, 1 << 16), multiple=True, metavar="N",
    help="Rows of the input; may be repeated.  [default: 1, 4, 32, 512]",
)  # fmt: skip
@click.option("--dtype", "dtypes", type=click.Choice(WEIGHT_TYPES), multiple=True, metavar="TYPE",
    help="Of the weights: a storage type, or a block format such as Q4_1; may be repeated.  [default: Q4_1]",
)  # fmt: skip
@_threads
@_seconds
@_json
@runtime.debug_option
def matmul(
    shapes: Sequence[tuple[int, int]], counts: Sequence[int], dtypes: Sequence[str], threads: int | None,
    seconds: float, as_object: bool,
) -> int:  # fmt: skip
    """Matrix products with weights of any kept type: GB/s of weights and GOP/s, over the roofs of the same rounds.

    Small matrices are cycled through more memory than the caches hold, as they are in a model.
    """
    from cupaged.bench import kernels as bench
    from cupaged.bench.cases import block_columns

    shapes = shapes or bench.SHAPES
    dtypes = dtypes or ("Q4_1",)
    for dtype in dtypes:
        for outputs, inputs in shapes:
            if inputs % block_columns(dtype):
                raise OptionError(
                    f"--shape {outputs}x{inputs}: {dtype} needs inputs in blocks of {block_columns(dtype)}"
                )
    _measure("matmul", lambda device: bench.matmul_cases(device, dtypes, shapes, counts or (1, 4, 32, 512)),
             threads, seconds, as_object)  # fmt: skip
    return 0


@click.command(short_help="Paged attention: GB/s and GOP/s beside the roofs.")
@click.option("--heads", type=number(int, 1, 1024), default=9, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=number(int, 1, 1024), default=3, show_default=True, help="K/V heads.")
@click.option("--head-dim", type=number(int, 1, 512), default=64, show_default=True, help="Numbers in a head.")
@click.option("--context", "contexts", type=number(int, 1, _MAX_TOKENS), multiple=True, metavar="TOKENS",
    help="Of each sequence; may be repeated.  [default: 256, 1024, 4096]",
)  # fmt: skip
@click.option("--queries", type=number(int, 1, 1 << 16), default=1, show_default=True,
    help="Of each sequence, the last of its context: 1 is decoding, more a prompt's chunk.",
)  # fmt: skip
@click.option("--sequences", type=number(int, 1, 4096), default=1, show_default=True, help="In a step.")
@click.option("--shared", type=number(int, 0, _MAX_TOKENS), default=0, show_default=True, metavar="TOKENS",
    help="At the front of every context, in the same blocks for all sequences.",
)  # fmt: skip
@click.option("--block-size", type=number(int, 1, 256), default=16, show_default=True, help="Tokens in a KV block.")
@click.option("--dtype", "dtypes", type=click.Choice(list(STORAGE_BYTES)), multiple=True,
    help="Of K/V; may be repeated.  [default: float16]",
)  # fmt: skip
@_threads
@_seconds
@_json
@runtime.debug_option
def attention(
    heads: int, kv_heads: int, head_dim: int, contexts: Sequence[int], queries: int, sequences: int, shared: int,
    block_size: int, dtypes: Sequence[str], threads: int | None, seconds: float, as_object: bool,
) -> int:  # fmt: skip
    """Paged attention over scattered blocks: GB/s of K/V and GOP/s, over the roofs of the same rounds."""
    from cupaged.bench import kernels as bench
    from cupaged.bench.cases import AttentionShape

    contexts = contexts or (256, 1024, 4096)
    if heads % kv_heads:
        raise OptionError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    if shared % block_size:
        raise OptionError(f"--shared {shared} is not a multiple of --block-size {block_size}")
    for context in contexts:
        if shared + queries > context:
            raise OptionError(f"--context {context} does not hold --shared {shared} and --queries {queries}")
        if context * sequences > _MAX_TOKENS:
            raise OptionError(f"--context {context} of --sequences {sequences} is more than {_MAX_TOKENS} tokens")
    shapes = [
        AttentionShape(heads, kv_heads, head_dim, context, queries, sequences, shared, block_size)
        for context in contexts
    ]
    _measure("attention", lambda device: bench.attention_cases(device, dtypes or ("float16",), shapes),
             threads, seconds, as_object)  # fmt: skip
    return 0


def _measure(kernel: str, cases: Any, threads: int | None, seconds: float, as_object: bool) -> None:
    from cupaged.bench.against import measure
    from cupaged.bench.roofs import Roofs
    from cupaged.device.cpu import CpuDevice
    from cupaged.loading import Reports

    table = Table(as_object)
    with Progress() as progress, closing(CpuDevice(threads, Reports(progress).of("kernels", "kernels"))) as device:
        roofs = Roofs(device.team)
        listed: Iterable[Any] = cases(device)
        for case in listed:
            measured = measure(case, roofs, seconds)
            progress.clear()
            table.show(kernel, measured)
