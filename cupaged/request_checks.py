"""What is refused when a request arrives, before anything of it exists. Each refusal names the value and the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cupaged.errors import CapacityError, RequestError, shown
from cupaged.memory import BlockManager, blocks_for
from cupaged.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """The limits of an engine. `encode`: None for a model without a tokenizer."""

    vocab_size: int
    max_model_len: int
    max_sequences: int
    manager: BlockManager
    encode: Callable[[str], list[int]] | None
    has_text: bool

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as plain ints; RequestError (CapacityError for lengths) if it cannot be served."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: {shown(params)} is not SamplingParams")
        try:
            listed = list(prompt_ids)
        except TypeError:
            raise RequestError(f"prompt: {shown(prompt_ids)} is not a list of token ids") from None
        vocab = self.vocab_size
        ids = []
        for index, token in enumerate(listed):
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise RequestError(f"prompt: item {index} is {shown(token)}, not a token id")
            if not 0 <= token < vocab:
                raise RequestError(f"prompt: token id {shown(token)} at index {index} is not in 0..{vocab - 1}")
            ids.append(int(token))
        if not ids:
            raise RequestError("prompt: it is empty (no token at all)")
        for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            for token in tokens:
                if token >= vocab:
                    raise RequestError(f"{name}: token id {token} is not in 0..{vocab - 1}")
        self.bad_words(params)
        if params.stop_strings and not self.has_text:
            raise RequestError("stop: this model has no tokenizer, so stop strings cannot be found; use stop_token_ids")
        if params.beam_width is not None and params.beam_width > self.max_sequences:
            raise RequestError(
                f"beam_width: {params.beam_width} beams step together, and a step of this engine takes "
                f"{self.max_sequences} sequences (max_sequences)"
            )
        self._check_length(len(ids), params)
        return ids

    def _check_length(self, length: int, params: SamplingParams) -> None:
        new = 1 if params.max_tokens is None else params.max_tokens
        if length + new > self.max_model_len:
            size = self.manager.groups[0].block_size
            raise CapacityError(
                f"prompt of {length} tokens and {new} to generate need {length + new} positions "
                f"({blocks_for(length + new, size)} blocks); this engine has {self.max_model_len} for a sequence "
                f"({blocks_for(self.max_model_len, size)} blocks, {self.manager.pools[0].num_blocks} in all)"
            )

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """bad_words as token ids, each as it is at the start of a word and inside one."""
        if not params.bad_words:
            return ()
        if self.encode is None:
            raise RequestError("bad_words: this model has no tokenizer to find their tokens with; use logit_bias")
        forms = [self.encode(form) for word in params.bad_words for form in (word, f" {word.lstrip()}")]
        return tuple(dict.fromkeys(tuple(ids) for ids in forms if ids))
