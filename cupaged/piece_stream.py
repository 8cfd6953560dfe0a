"""A stream of one request's pieces, as `LLM.stream` gives it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cupaged.errors import DeviceError, RequestError
from cupaged.outputs import RequestOutput, StreamPiece
from cupaged.sampling import SamplingParams

if TYPE_CHECKING:
    from cupaged.llm import LLM, Prompt


class PieceStream:
    """Iterator over the pieces of one request. `close`, a with block, or dropping it ends the request if it runs."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self.request_id = request_id
        self._llm = llm
        self._closed = False
        self._last: RequestOutput | None = None
        request = llm._model.engine.request(request_id)
        self._params, self._prompt_length = request.params, len(request.prompt_ids)
        self._read: Counter[int] = Counter()  # tokens of each output that were read
        self._pieces = llm._pieces(request_id)
        self._reading = threading.Lock()  # several threads may read one stream: each piece goes to one of them

    def __iter__(self) -> PieceStream:
        return self

    def __next__(self) -> StreamPiece:
        if self._closed:
            raise StopIteration
        try:
            with self._reading:
                piece = next(self._pieces)
                self._read[piece.index] += len(piece.token_ids)
                return piece
        except BaseException:
            self.close()
            raise

    def fork(self, continuation: Prompt = (), params: SamplingParams | None = None, *, index: int = 0) -> PieceStream:
        """Branch off: another stream, whose prompt is this one's prompt, what was read of its output `index`, and
        `continuation` (text, or token ids).

        The K/V of what both have in common are shared while this stream's request runs. params: by default the same,
        for one output. Both go on and end each by itself.
        """
        llm = self._llm
        with llm._lock:
            if isinstance(continuation, str):
                tokenizer = llm._model.tokenizer
                if tokenizer is None:
                    raise RequestError("continuation: this model folder has no tokenizer; give token ids, not text")
                more: Sequence[int] = tokenizer.encode(continuation, add_special_tokens=False)
            else:
                _, more = llm._encode(continuation)
            if self._last is None:
                length = self._prompt_length + self._read[index]
                request_id = llm._model.engine.fork(self.request_id, more, params, index=index, length=length)
                return PieceStream(llm, llm._watch(request_id))
            if not 0 <= index < len(self._last.outputs):
                raise RequestError(f"fork: output {index!r:.40} is not in 0..{len(self._last.outputs) - 1}")
            from cupaged.registry import for_one

            ids = [*self._last.prompt_token_ids, *self._last.outputs[index].token_ids[: self._read[index]], *more]
            return PieceStream(llm, llm._submit(ids, params or for_one(self._params), None))

    def output(self) -> RequestOutput:
        """The result as it stands, `.error` set if the request failed; after the end or `close`, the last there was."""
        if self._last is not None:
            return self._last
        with self._llm._lock:
            return self._llm._model.engine.request(self.request_id).output()

    def close(self) -> None:
        """End the request if it still runs."""
        if not self._closed:
            with self._llm._lock, contextlib.suppress(DeviceError):  # the LLM may have been closed before
                self._last = self.output()
            self._drop()

    def _drop(self) -> None:
        if not self._closed:
            self._closed = True
            self._llm._forget([self.request_id])

    def __enter__(self) -> PieceStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._drop()
