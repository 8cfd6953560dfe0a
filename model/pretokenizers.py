"""The named pre-tokenizers of GGUF files: how text is cut into words before byte-level BPE merges inside each.

A GGUF holds the name alone (`tokenizer.ggml.pre`); names and rules are those of llama.cpp (llama-vocab.cpp), and where
its regular expression is a stand-in for the published one (its own engine lacks a feature), the published one is used,
with the normaliser that the model's tokenizer.json has and a GGUF leaves out. A wrong rule gives plausible but wrong
ids. So a name is here only if its rule is certain, and any other is refused. Absent for want of that certainty:
deepseek-llm, whose rule lists its letters one by one, and falcon, whose published order of cuts llama.cpp does not
follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

# The cutting rule of GPT-2 (openai/gpt-2, encoder.py), less its last alternative, \s+: what no part matches is cut too.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Llama 3 and Qwen 2 differ in how many digits stay together.
_LLAMA3_WORDS = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2_WORDS = _LLAMA3_WORDS.replace("{1,3}", "")
# Mistral's Tekken and GPT-4o: a word is letters of upper case, then of lower case.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _SIGNS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN_WORDS = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SIGNS}|{_SPACES}"
_GPT4O_WORDS = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIX}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIX}?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


def _gpt2() -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> PreTokenizer:
    """Every digit by itself, the rest as GPT-2."""
    from tokenizers.pre_tokenizers import Digits, Sequence

    return Sequence([Digits(individual_digits=True), _gpt2()])


def _cuts(*rules: str) -> Callable[[], PreTokenizer]:
    """Cut by each expression in turn; what it does not match stays a piece too."""

    def build() -> PreTokenizer:
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

        splits: list[PreTokenizer] = [Split(Regex(rule), behavior="isolated") for rule in rules]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """One name's rule. `nfc`: text is brought into Unicode's form NFC first. `whole_words`: a word that is a token is
    taken as it is, without merging. `add_bos`: what holds if the file does not say."""

    cut: Callable[[], PreTokenizer]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def install(self, backend: Backend, space_before: bool) -> None:
        """Set normaliser and pre-tokenizer. space_before: each stretch of text between special tokens gets a space."""
        from tokenizers import normalizers

        steps: list[normalizers.Normalizer] = [normalizers.Prepend(" ")] if space_before else []
        if self.nfc:
            steps.append(normalizers.NFC())
        if steps:
            backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = self.cut()


# What llama.cpp does with files whose converter did not know the model's own rule.
_DEFAULT = _cuts(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
_LLAMA3 = PreTokenizerRule(_cuts(_LLAMA3_WORDS), whole_words=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizerRule] = {
    "default": PreTokenizerRule(_DEFAULT),
    "gpt-2": PreTokenizerRule(_gpt2),
    "phi-2": PreTokenizerRule(_gpt2),
    "mpt": PreTokenizerRule(_gpt2, nfc=True),
    "olmo": PreTokenizerRule(_gpt2, nfc=True),
    "smollm": PreTokenizerRule(_digits_apart),
    "starcoder": PreTokenizerRule(_digits_apart),
    "refact": PreTokenizerRule(_digits_apart),
    "command-r": PreTokenizerRule(_digits_apart, nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": PreTokenizerRule(_cuts(_LLAMA3_WORDS)),
    "smaug-bpe": PreTokenizerRule(_cuts(_LLAMA3_WORDS)),
    "qwen2": PreTokenizerRule(_cuts(_QWEN2_WORDS), nfc=True),
    "deepseek-r1-qwen": PreTokenizerRule(_cuts(_QWEN2_WORDS)),
    "stablelm2": PreTokenizerRule(_cuts(_QWEN2_WORDS)),
    "tekken": PreTokenizerRule(_cuts(_TEKKEN_WORDS), whole_words=True, add_bos=True),
    "gpt-4o": PreTokenizerRule(_cuts(_GPT4O_WORDS)),
    "deepseek-coder": PreTokenizerRule(
        _cuts(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-v3": PreTokenizerRule(
        _cuts(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3_WORDS)
    ),
}
