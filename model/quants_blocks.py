"""ggml's block formats, from stored bytes to float32: what `quants.FORMATS` is made of.

Layouts are those of ggml-common.h, the arithmetic that of ggml-quants.c, and every result is bit-equal to the `gguf`
package's: a float32 scale, then product, then sum, each rounded once. d and m are float16, little-endian; "low, high"
are the halves of a byte; [a] q counts entries, not bytes, and bit fields start at the lowest bit.

Blocks of 32 values. Byte j of `qs` holds q[j] low and q[j+16] high; bit j of `qh` is the fifth bit of q[j].

    Q8_0    34 bytes: d, [32] int8 q                                value = d * q
    Q4_0    18 bytes: d, qs[16]                                     value = d * (q - 8)
    Q4_1    20 bytes: d, m, qs[16]                                  value = d * q + m
    Q5_0    22 bytes: d, qh[4], qs[16]                              value = d * (q - 16)
    Q5_1    24 bytes: d, m, qh[4], qs[16]                           value = d * q + m
    IQ4_NL  18 bytes: d, qs[16]                                     value = d * LEVELS[q]

Superblocks of 256 values in groups of 16 or 32, each with a small integer scale (s) and perhaps a minimum (t) of its
own. 2 bits: byte j of each 32 holds q[j], q[j+32], q[j+64], q[j+96] of 128 values. 4 bits: byte j of each 32 holds q[j]
low and q[j+32] high of 64 values.

    Q2_K    84 bytes: s low and t high [16], qs[64], d, m           value = d*s * q - m*t
    Q3_K   110 bytes: third bit [32], qs[64], s[12], d              value = d*(s-32) * (q - 4), third bit set: q
    Q4_K   144 bytes: d, m, s and t [12], qs[128]                   value = d*s * q - m*t
    Q5_K   176 bytes: d, m, s and t [12], fifth bit [32], qs[128]   value = d*s * q - m*t
    Q6_K   210 bytes: low 4 bits [128], high 2 bits [64], s[16] int8, d     value = d*s * (q - 32)
    IQ4_XS 136 bytes: d, high 2 bits of s [2], low 4 bits of s [4], qs[128] value = d*(s-32) * LEVELS[q]

Every function takes uint8 [..., block bytes] and returns a new float32 [..., values].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

# The 16 levels of IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl).
_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# The same by whole byte: the level of its low half, of its high half. bytes.translate is NumPy's fastest look-up.
_LOW_LEVELS = np.tile(_LEVELS, 16).tobytes()
_HIGH_LEVELS = np.repeat(_LEVELS, 16).tobytes()


def q8_0(raw: Bytes) -> Float32:
    out = raw[..., 2:].view(np.int8).astype(np.float32)
    out *= _halves(raw, 0)
    return out


def q4_0(raw: Bytes) -> Float32:
    return _times(_offset(_nibbles(raw[..., 2:], 16), 8), _halves(raw, 0))


def q4_1(raw: Bytes) -> Float32:
    return _times(_nibbles(raw[..., 4:], 16), _halves(raw, 0), plus=_halves(raw, 2))


def q5_0(raw: Bytes) -> Float32:
    return _times(_offset(_five_bits(raw[..., 2:6], raw[..., 6:]), 16), _halves(raw, 0))


def q5_1(raw: Bytes) -> Float32:
    return _times(_five_bits(raw[..., 4:8], raw[..., 8:]), _halves(raw, 0), plus=_halves(raw, 2))


def iq4_nl(raw: Bytes) -> Float32:
    return _times(_levels(raw[..., 2:], 16), _halves(raw, 0))


def q2_k(raw: Bytes) -> Float32:
    both = raw[..., :16]
    scale = _halves(raw, 80) * (both & np.uint8(15)).astype(np.float32)
    minimum = _halves(raw, 82) * (both >> np.uint8(4)).astype(np.float32)
    return _grouped(_fields(raw[..., 16:80], 32, (0, 2, 4, 6), 3), scale, minimum)


def q3_k(raw: Bytes) -> Float32:
    # Scales of 6 bits: the low 4 of s[0..7] are the low halves of bytes 0..7, of s[8..15] the high ones; the upper 2 of
    # s[4i + j] lie in byte 8 + j, at bit 2i.
    low = np.concatenate([raw[..., 96:104] & np.uint8(15), raw[..., 96:104] >> np.uint8(4)], axis=-1)
    high = _fields(raw[..., 104:108], 4, (0, 2, 4, 6), 3)
    signed = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    scale = _halves(raw, 108) * signed.astype(np.float32)
    q = _fields(raw[..., 32:96], 32, (0, 2, 4, 6), 3)
    q |= _fields(raw[..., :32], 32, range(8), 1) << np.uint8(2)
    return _grouped(_offset(q, 4), scale)


def q4_k(raw: Bytes) -> Float32:
    scale, minimum = _scales_and_minima(raw)
    return _grouped(_nibbles(raw[..., 16:], 32), scale, minimum)


def q5_k(raw: Bytes) -> Float32:
    scale, minimum = _scales_and_minima(raw)
    q = _nibbles(raw[..., 48:], 32)
    q |= _fields(raw[..., 16:48], 32, range(8), 1) << np.uint8(4)
    return _grouped(q, scale, minimum)


def q6_k(raw: Bytes) -> Float32:
    q = _nibbles(raw[..., :128], 64)
    q |= _fields(raw[..., 128:192], 32, (0, 2, 4, 6), 3) << np.uint8(4)
    scale = _halves(raw, 208) * raw[..., 192:208].view(np.int8).astype(np.float32)
    return _grouped(_offset(q, 32), scale)


def iq4_xs(raw: Bytes) -> Float32:
    # s[i]: its low 4 bits are a half of byte 4 + i/2, its upper 2 lie at bit 2i of the 16 bits before.
    low = _nibbles(raw[..., 4:8], 1)
    high = _fields(raw[..., 2:4], 1, (0, 2, 4, 6), 3)
    signed = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    return _grouped(_levels(raw[..., 8:], 16), _halves(raw, 0) * signed.astype(np.float32))


def _halves(raw: Bytes, at: int) -> Float32:
    """The float16 at byte `at` of each block, as float32 [..., 1]."""
    return raw[..., at : at + 2].copy().view("<f2").astype(np.float32)


def _fields(packed: Bytes, run: int, shifts: Sequence[int], mask: int) -> Bytes:
    """The bit fields of each `run` bytes: those at the first shift of all bytes, then those at the second, ..."""
    *blocks, count = packed.shape  # spelled out, because NumPy guesses no size of an array without blocks
    runs = packed.reshape(*blocks, count // run, run)
    out = np.empty((*blocks, count // run, len(shifts), run), np.uint8)
    for place, shift in enumerate(shifts):
        np.right_shift(runs, np.uint8(shift), out=out[..., place, :])
    out &= np.uint8(mask)
    return out.reshape(*blocks, count * len(shifts))


def _nibbles(packed: Bytes, run: int) -> Bytes:
    return _fields(packed, run, (0, 4), 15)


def _five_bits(high: Bytes, packed: Bytes) -> Bytes:
    q = _nibbles(packed, 16)
    q |= np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)
    return q


def _levels(packed: Bytes, run: int) -> npt.NDArray[np.int8]:
    *blocks, count = packed.shape
    stored = packed.tobytes()
    runs = (*blocks, count // run, run)
    out = np.empty((*blocks, count // run, 2, run), np.int8)
    out[..., 0, :] = np.frombuffer(stored.translate(_LOW_LEVELS), np.int8).reshape(runs)
    out[..., 1, :] = np.frombuffer(stored.translate(_HIGH_LEVELS), np.int8).reshape(runs)
    return out.reshape(*blocks, count * 2)


def _offset(q: Bytes, by: int) -> npt.NDArray[np.int8]:
    signed = q.view(np.int8)
    signed -= np.int8(by)
    return signed


def _times(q: npt.NDArray[np.uint8] | npt.NDArray[np.int8], scale: Float32, plus: Float32 | None = None) -> Float32:
    out: Float32 = q.astype(np.float32)
    out *= scale
    if plus is not None:
        out += plus
    return out


def _grouped(
    q: npt.NDArray[np.uint8] | npt.NDArray[np.int8], scale: Float32, minimum: Float32 | None = None
) -> Float32:
    """q in as many equal groups as there are scales: scale * q - minimum."""
    out: Float32 = q.astype(np.float32)
    groups = out.reshape(*scale.shape, out.shape[-1] // scale.shape[-1])
    groups *= scale[..., None]
    if minimum is not None:
        groups -= minimum[..., None]
    return out


def _scales_and_minima(raw: Bytes) -> tuple[Float32, Float32]:
    """The 8 scales d*s and minima m*t of Q4_K and Q5_K, 6 bits each, in the 12 bytes after d and m.

    s[0..3] and t[0..3] are the low 6 bits of bytes 0..3 and 4..7, whose upper 2 bits are those of s[4..7] and t[4..7];
    the low 4 bits of these are the halves of bytes 8..11.
    """
    s, t, rest = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    low, upper = np.uint8(0x3F), np.uint8(0x30)
    s = np.concatenate([s & low, rest & np.uint8(15) | s >> np.uint8(2) & upper], axis=-1)
    t = np.concatenate([t & low, rest >> np.uint8(4) | t >> np.uint8(2) & upper], axis=-1)
    return _halves(raw, 0) * s.astype(np.float32), _halves(raw, 2) * t.astype(np.float32)
