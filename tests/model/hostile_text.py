"""Strings that break tokenizers: seeded, and the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence

_PIECES = [
    "0", "7", "12", "345", "2024", "3.14159", "1,000,000", "٣٤", "Ⅷ", "½", "²", "१२",
    " ", "  ", "   ", " " * 16, " " * 37, "\n", "\n\n", "\r\n", "\t", "\t\t\t", " \n ", "\x0b", "\x0c",
    "\u00a0", "\u2003", "\u3000", "\u2028", "\u200b", "\ufeff", "\u2581", "\u2581\u2581",
    "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "😀😀😀", "☃", "\U0001f9ff",
    "你好世界", "漢字", "日本語のテキスト", "カタカナ", "한국어", "丽", "𠜎𠜱", "。", "、", "（）",
    "สวัสดีชาวโลก", "ภาษาไทย", "นี่", "שלום", "مرحبا بالعالم", "\u202eabc\u202c", "नमस्ते", "தமிழ்", "Việt", "ไ",
    "é", "e\u0301", "ö", "o\u0308\u0323", "ﬁ", "Å", "Ångström", "ſ", "ß", "İ", "ı", "Ǆ", "µ",
    "\x00", "\x01", "\x07", "\x1b[31m", "\x1c", "\x1f", "\x7f", "\x80", "\x85", "\x9f", "\ufffd",
    "\ufffe", "\U0010ffff",
    "\ue000", "Ã©", "â€™", "ÿþ", "Ġ", "Ċ", "<0x41>", "<0xFF>",
    "a", "A", "the", " the", "The", "Hello", "HELLO", "hElLo", "I'm", "we'll", "DON'T", "it's", "'s", "'S", "’s", "x'y",
    "snake_case", "camelCase", "foo(bar)", "{}[]", "!=", "->", "...", "--", "\\n", "\\", "\"", "'", "`", "$x^2$",
    "#!/bin/sh",
    "https://example.com/?q=1&r=%20", "a@b.c", "<b>", "</s>", "<unk>", "<|", "|>", "<|im", "end|>", "<s", "[INST]",
]  # fmt: skip
_LONG = ["a", "ab", " a", "1", "=", "-", "\n", " ", "é", "好", "😀", "\u2581", "ha", "0a", "Aa", "\u0301"]


def hostile(added: Sequence[str], count: int = 500, seed: int = 0) -> list[str]:
    """`count` texts; `added` are tokens of the vocabulary to write into some of them, whole, doubled and cut."""
    rng = random.Random(seed)
    texts: list[str] = ["", *_PIECES, *(char * 300 for char in _LONG)]
    while len(texts) < count:
        kind = rng.random()
        if kind < 0.1:
            # Any characters at all, but halves of surrogate pairs, which are no text.
            points = (
                rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x110000)]) for _ in range(12)
            )
            texts.append("".join(chr(point) for point in points if not 0xD800 <= point < 0xE000))
            continue
        parts = [rng.choice(_PIECES) for _ in range(rng.randrange(1, 14))]
        if kind < 0.4 and added:
            for _ in range(rng.randrange(1, 4)):
                token = rng.choice(added)
                cut = rng.choice([token, token * 2, token[:-1], token[1:], f" {token} ", token.upper()])
                parts.insert(rng.randrange(len(parts) + 1), cut)
        elif kind < 0.5:
            parts.insert(rng.randrange(len(parts) + 1), rng.choice(_LONG) * rng.randrange(2, 70))
        texts.append(rng.choice(["", "", " "]).join(parts))
    return texts[:count]
