"""The requests that an engine knows by name, and how new ones are made: from a prompt, or as a branch of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from cupaged.errors import RequestError, shown
from cupaged.model.detokenizer import Detokenizer
from cupaged.request import Request, make_request
from cupaged.request import Sequence as TokenSequence
from cupaged.request_checks import RequestChecks
from cupaged.sampling import SamplingParams

MakeDetokenizer = Callable[[bool], Detokenizer]


class Registry:
    """Requests by id. What `new` makes is known by its id and not queued; `RequestError`, and nothing made, if it
    cannot be served."""

    def __init__(
        self, checks: RequestChecks, eos_ids: frozenset[int], make_detokenizer: MakeDetokenizer | None
    ) -> None:
        self.by_id: dict[str, Request] = {}
        self.checks = checks
        self._eos_ids = eos_ids
        self._make_detokenizer = make_detokenizer
        self._arrivals = count()
        self._names: Iterator[str] = (f"request-{number}" for number in count())

    def new(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None, prompt: str | None,
        priority: int,
    ) -> Request:  # fmt: skip
        ids = self.checks.check(prompt_ids, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority: {shown(priority)} is not a whole number")
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise RequestError(f"request id {shown(request_id)}: a string that is not empty is needed")
        if request_id is None:
            request_id = next(name for name in self._names if name not in self.by_id)
        elif request_id in self.by_id:
            raise RequestError(f"request id {shown(request_id)} is in use")
        longest = self.checks.max_model_len
        request = make_request(
            request_id,
            prompt,
            ids,
            params,
            longest if params.max_tokens is None else len(ids) + params.max_tokens,
            self._eos_ids,
            (priority, next(self._arrivals)),
            self._make_detokenizer,
            self.checks.bad_words(params),
        )
        self.by_id[request_id] = request
        return request

    def line(self, request_id: str, index: int, length: int | None) -> tuple[TokenSequence, list[int]]:
        """An output of a request, and its tokens so far, or the first `length` of them. RequestError: not there."""
        parent = self.by_id.get(request_id)
        if parent is None:
            raise RequestError(f"fork: there is no request {shown(request_id)}")
        lines = parent.reports if parent.state.terminal else parent.sequences
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(lines):
            raise RequestError(f"fork: output {shown(index)} of {request_id} is not in 0..{len(lines) - 1}")
        tokens = lines[index].tokens
        if length is None:
            length = len(tokens)
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= len(tokens):
            raise RequestError(f"fork: length {shown(length)} is not in 0..{len(tokens)}, the tokens so far")
        return lines[index], tokens[:length]


def for_one(params: SamplingParams) -> SamplingParams:
    """The same options for a single output."""
    return replace(params, n=1, best_of=None, beam_width=None, length_penalty=1.0, early_stopping=False)
