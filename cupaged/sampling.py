"""SamplingParams: how the tokens of one request are chosen, and when it ends. Standard library only."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from numbers import Real
from typing import Any, Literal, cast

from cupaged.errors import OptionError, shown

# At 1e-5 a token whose logit is 0.001 below the best has a probability of e**-100: greedy in all but name. Below that,
# dividing logits by the temperature only loses precision. (vLLM draws the line at the same place.)
GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 100.0  # at 100 any real model's distribution is already flat; larger values are slips of the keyboard
MAX_LOGPROBS = 20  # memory and output per token stay O(k), not O(vocabulary)
MAX_STRINGS = 64  # of stop and bad_words
MAX_STRING_LENGTH = 256  # characters
MAX_PENALTY = 2.0  # of presence and frequency, on either side of 0, as OpenAI's API has it
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_BIAS = 100.0
MAX_BIASED = 4096  # ids in logit_bias
MAX_SAMPLES = 1024  # of n and best_of
MAX_SALT = 256
MAX_BEAMS = 256
MAX_LENGTH_PENALTY = 10.0  # on either side of 0
MAX_INT32 = 2**31 - 1  # counts and token ids are int32 in kernels

LogitsProcessor = Callable[[list[int], Any], Any]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one request, validated when made; a bad or unknown one raises OptionError.

    Order of the steps: repetition_penalty, presence and frequency penalty, logit_bias, min_tokens, bad_words,
    logits_processor; then temperature, top-k, renormalise, top-p, min-p; at least one token always remains. Reported
    log-probabilities are those of the model, before any of these.
    NumPy integers and floats are taken like Python's; bool is not a number here, and 16.0 is not an integer.

    max_tokens: tokens to generate at most, 0 .. 2**31-1; None: up to the model's context length. 0 gives an empty text
        that ends with "length".
    temperature: 0 .. 100; below 1e-5 it is greedy.
    top_k: keep the k most likely tokens, 1 .. 2**31-1; 0 or -1 is off (-1 is stored as 0).
    top_p: keep the shortest prefix, most likely first, whose mass reaches p, 0 .. 1; 1 is off, 0 keeps the best token.
    min_p: keep tokens at least this fraction as likely as the best, 0 .. 1; 0 is off.
    seed: 0 .. 2**63-1, makes the request repeatable; None: a fresh one.
    stop: one string or several (at most 64, of 1 to 256 characters) that end the text; stored as a tuple.
    stop_token_ids: token ids, 0 .. 2**31-1, that end the text; stored as a tuple. The engine checks them against the
        vocabulary.
    logprobs: return log-probabilities of the chosen and the k most likely tokens, 0 .. 20; None: none.
    ignore_eos: go on after the model's own end-of-sequence tokens. stop and stop_token_ids still end the text.
    skip_special_tokens: leave special tokens out of the text.
    include_stop_str_in_output: leave the stop string in the text.
    repetition_penalty: 0.01 .. 100; logits of tokens of prompt and output, once per id, are divided by it if
        positive, else multiplied (Keskar et al. 2019, "CTRL", section 4.1); 1 is off.
    presence_penalty, frequency_penalty: -2 .. 2; logits of generated tokens are lowered once, or once per occurrence.
    logit_bias: token id -> number in -100 .. 100 that is added to its logit; at most 4096 ids.
    min_tokens: 0 .. 2**31-1; before so many tokens no end-of-sequence or stop token is taken, and no stop string found.
    bad_words: strings (at most 64, of 1 to 256 characters) whose tokens are not completed, at the start of a word or
        inside. Needs a tokenizer.
    prompt_logprobs: the same as logprobs for each token of the prompt, 0 .. 20; the first has none.
    logits_processor: called for each new token as ``f(token_ids, logits)`` with the ids so far (prompt and output) and
        the logits, float32 [V], its own to change; returns logits, or None if it changed them in place. If it raises,
        that request ends with an error; but a KeyboardInterrupt or the like on the main thread goes to the caller.
    n: outputs, 1 .. 1024. The prompt is computed and stored once; output i is the same whatever n is. With best_of or
        beam_width: the n best.
    best_of: sequences to sample, n .. 1024, of which the n with the highest mean log-probability of their tokens (of
        the model, see above) are returned, best first; among equals the one sampled first. None: n, in order.
    beam_width: beam search with so many beams, 1 .. 256, instead of sampling: temperature must be 0 or 1 and top_k,
        top_p and min_p off. The rules are those of Hugging Face's `generate`; penalties, bias, min_tokens, bad_words
        and logits_processor work on log-probabilities there. None: no beam search.
    length_penalty: -10 .. 10; of beams: an output's score is the sum of its log-probabilities divided by its number of
        tokens to this power, so that above 0 favours long ones and below 0 short ones.
    early_stopping: of beams: True ends the search once there are beam_width finished outputs; False when none of the
        running beams, as long as it is now, scores better than the worst of these; "never" only when none could at any
        length up to max_tokens.
    cache_salt: requests of different salts use none of each other's cached blocks, so that nobody can tell from its
        speed what another one's prompt was. Changes no output.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # a dict of its own
    min_tokens: int = 0
    bad_words: Sequence[str] = ()
    prompt_logprobs: int | None = None
    logits_processor: LogitsProcessor | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("max_tokens", _optional_int("max_tokens", self.max_tokens, 0, MAX_INT32))
        put("temperature", _float("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        put("top_k", max(0, _int("top_k", self.top_k, -1, MAX_INT32, "0 or -1 for off")))
        put("top_p", _float("top_p", self.top_p, 0.0, 1.0))
        put("min_p", _float("min_p", self.min_p, 0.0, 1.0))
        put("seed", _optional_int("seed", self.seed, 0, 2**63 - 1))
        put("stop", _strings("stop", self.stop))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        put("logprobs", _optional_int("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        put("repetition_penalty", _float("repetition_penalty", self.repetition_penalty, MIN_REPETITION, MAX_REPETITION))
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, _float(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY))
        put("logit_bias", _logit_bias(self.logit_bias))
        put("min_tokens", _int("min_tokens", self.min_tokens, 0, MAX_INT32))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(f"min_tokens={self.min_tokens} is out of range: 0 .. max_tokens ({self.max_tokens})")
        put("bad_words", _strings("bad_words", self.bad_words))
        put("prompt_logprobs", _optional_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS))
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise OptionError(f"logits_processor={shown(self.logits_processor)}: a function is needed, or None")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(f"{name}={shown(value)}: True or False is needed")
        put("n", _int("n", self.n, 1, MAX_SAMPLES))
        put("best_of", _optional_int("best_of", self.best_of, 1, MAX_SAMPLES))
        put("beam_width", _optional_int("beam_width", self.beam_width, 1, MAX_BEAMS))
        put("length_penalty", _float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise OptionError(f'early_stopping={shown(self.early_stopping)}: True, False or "never" is needed')
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and len(self.cache_salt) <= MAX_SALT):
            raise OptionError(
                f"cache_salt={shown(self.cache_salt)}: a string of at most {MAX_SALT} characters is needed"
            )
        self._check_group()

    def _check_group(self) -> None:
        """What the options of several sequences say together."""
        if self.beam_width is None:
            if self.best_of is not None and self.best_of < self.n:
                raise OptionError(f"best_of={self.best_of} is out of range: n ({self.n}) .. {MAX_SAMPLES} is allowed")
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise OptionError(f"{name}={shown(getattr(self, name))}: this is for beam search; set beam_width")
            return
        if self.n > self.beam_width:
            raise OptionError(f"n={self.n} is out of range: 1 .. beam_width ({self.beam_width}) is allowed")
        if self.best_of is not None:
            raise OptionError(f"best_of={self.best_of}: beam search does not sample; its n best beams are returned")
        if not (self.greedy or self.temperature == 1.0):
            raise OptionError(f"temperature={self.temperature:g}: beam search does not sample; 0 or 1 is allowed")
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise OptionError(f"{name}={getattr(self, name):g}: beam search does not sample; {off:g} is allowed")

    @property
    def num_sequences(self) -> int:
        """Sequences that run side by side: beams, or samples."""
        return self.beam_width or self.best_of or self.n

    @property
    def picks(self) -> bool:
        """The outputs are the best of more candidates, so that they are known at the end only."""
        return self.beam_width is not None or (self.best_of or self.n) > self.n

    @property
    def greedy(self) -> bool:
        """The most likely token is taken each time; the other sampling options then change nothing."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def adjusts(self) -> bool:
        """Whether anything changes the logits before temperature."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
            or self.bad_words
            or self.logits_processor is not None
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is stored: a tuple, empty for None."""
        return cast("tuple[str, ...]", self.stop)


def _name_unknown_keywords(cls: type) -> None:
    """The generated __init__ answers an unknown keyword with a bare TypeError; here it gets our error and a hint."""
    generated = cls.__init__  # type: ignore[misc]

    @wraps(generated)  # keeps the signature that help() and editors show
    def __init__(self: Any, /, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
                raise OptionError(_unknown(name, list(cls.__dataclass_fields__)))  # type: ignore[attr-defined]
        generated(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]


_name_unknown_keywords(SamplingParams)


def _unknown(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"unknown sampling option {name!r}; {hint}"


def _int(name: str, value: object, low: int, high: int, note: str = "") -> int:
    limits = f"{low} .. {high}" + (f" ({note})" if note else "")
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(cast(Any, value))
    except TypeError:
        raise OptionError(f"{name}={shown(value)}: an integer in {limits} is needed") from None
    if not low <= number <= high:
        raise OptionError(f"{name}={shown(number)} is out of range: {limits} is allowed")
    return number


def _optional_int(name: str, value: object, low: int, high: int) -> int | None:
    return None if value is None else _int(name, value, low, high, "or None")


def _float(name: str, value: object, low: float, high: float) -> float:
    limits = f"{low:g} .. {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name}={shown(value)}: a number in {limits} is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:  # NaN compares false, so it ends here too
        raise OptionError(f"{name}={shown(value)} is out of range: {limits} is allowed")
    return number


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise OptionError(f"{name}={shown(value)}: a string or a list of strings is needed")
    if len(value) > MAX_STRINGS:
        raise OptionError(f"{name}: {len(value)} strings, at most {MAX_STRINGS} are allowed")
    for index, string in enumerate(value):
        if not isinstance(string, str):
            raise OptionError(f"{name}[{index}]={shown(string)}: a string is needed")
        if not 1 <= len(string) <= MAX_STRING_LENGTH:
            raise OptionError(
                f"{name}[{index}] has {len(string)} characters: 1 .. {MAX_STRING_LENGTH} is allowed (no string: None)"
            )
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise OptionError(f"logit_bias={shown(value)}: a mapping of token ids to numbers is needed, or None")
    if len(value) > MAX_BIASED:
        raise OptionError(f"logit_bias: {len(value)} ids, at most {MAX_BIASED} are allowed")
    checked = {}
    for index, (key, bias) in enumerate(value.items()):
        token = _int(f"logit_bias: id {index}", key, 0, MAX_INT32)
        checked[token] = _float(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
    return checked


def _token_ids(value: object) -> tuple[int, ...]:
    # NumPy arrays are no Sequence; anything that can be listed, but text and bytes, may hold ids.
    if isinstance(value, (str, bytes, bytearray)):
        raise OptionError(f"stop_token_ids={shown(value)}: a list of token ids is needed")
    try:
        ids = list(cast(Any, value))
    except TypeError:
        raise OptionError(f"stop_token_ids={shown(value)}: a list of token ids is needed") from None
    return tuple(_int(f"stop_token_ids[{index}]", token, 0, MAX_INT32) for index, token in enumerate(ids))
