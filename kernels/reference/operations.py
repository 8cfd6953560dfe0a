"""`ReferenceOperations`: the functions of this package under the names of `interface.Operations`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupaged.kernels.reference import attention, blocks, dense, sampling

if TYPE_CHECKING:
    from cupaged.kernels.interface import Operations


class ReferenceOperations:
    """`interface.Operations` on NumPy arrays. Without state; each method is documented where it is written."""

    matrix = staticmethod(dense.matrix)
    vector = staticmethod(dense.vector)
    embed = staticmethod(dense.embed)
    take_rows = staticmethod(dense.take_rows)
    rms_norm = staticmethod(dense.rms_norm)
    head_norm = staticmethod(dense.head_norm)
    matmul = staticmethod(dense.matmul)
    rope = staticmethod(dense.rope)
    gated_activation = staticmethod(dense.gated_activation)
    add = staticmethod(dense.add)
    write_kv = staticmethod(blocks.write_kv)
    copy_blocks = staticmethod(blocks.copy_blocks)
    plan_attention = staticmethod(attention.plan_attention)
    paged_attention = staticmethod(attention.paged_attention)
    sample = staticmethod(sampling.sample)
    broken_rows = staticmethod(sampling.broken_rows)


if TYPE_CHECKING:
    _: Operations = ReferenceOperations()  # mypy compares every signature with the interface
