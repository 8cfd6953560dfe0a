"""AsyncEngine: many requests at once, from asyncio and from threads, each streaming its own result.

One worker thread owns the model and runs its steps (`worker.Worker`); this side checks requests where they are made, so
that errors come at once, and reads their pieces.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cupaged.errors import OptionError, shown
from cupaged.llm import LLM, Prompt
from cupaged.outputs import RequestOutput, StreamPiece
from cupaged.sampling import SamplingParams
from cupaged.stats import EngineStats
from cupaged.worker import Submission, Worker


class AsyncEngine:
    """A model that serves many requests at once.

    weights and options as for `LLM`. max_requests: running and waiting ones together; more are refused with
    QueueFullError. Loading blocks: in an asyncio program use `await asyncio.to_thread(AsyncEngine, ...)`.

    A smaller `priority` goes first, and among equals the earlier; what a request yields depends on neither. `deadline`:
    seconds from now, after which the request is ended with finish_reason "abort" and stop_reason "deadline".

    Every request ends with exactly one piece that carries `usage`, whatever ends it. A request that fails ends alone,
    with finish_reason "error" and the message in `output().error`.

    After `os.fork()` the child must make an engine of its own.
    """

    def __init__(self, weights: str | Path, *, max_requests: int = 1024, **options: Any) -> None:
        if isinstance(max_requests, bool) or not isinstance(max_requests, int) or max_requests < 1:
            raise OptionError(f"max_requests={shown(max_requests)}: a whole number from 1 on is allowed")
        self._llm = LLM(weights, **options)
        self._worker = Worker(self._llm, max_requests)
        self._names = (f"request-{number}" for number in itertools.count())
        # Neither a forgotten engine nor the interpreter's end leaves a thread in the middle of a step.
        self._finalizer = weakref.finalize(self, _stop, self._worker)
        atexit.register(_stop_weakly, weakref.ref(self._worker))

    # -- requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> AsyncStream:
        """Queue a request, to be read with `async for` by the running event loop.

        RequestError, OptionError, QueueFullError or DeviceError come at once. Leaving the loop early, cancelling it, or
        dropping the stream ends the request.
        """
        stream = AsyncStream(self._worker, self._name(request_id), asyncio.get_running_loop())
        self._submit(stream, prompt, params, priority, deadline)
        return stream

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> ThreadStream:
        """`generate` for threads: queue a request, to be read with `for`, or as a whole with `result()`."""
        stream = ThreadStream(self._worker, self._name(request_id))
        self._submit(stream, prompt, params, priority, deadline)
        return stream

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        **template: Any,
    ) -> AsyncStream:
        """`generate` on a conversation, put through the model's chat template; see `LLM.chat`."""
        prompt = self._llm.chat_ids(messages, **template)
        return self.generate(prompt, params, request_id=request_id, priority=priority, deadline=deadline)

    async def abort(self, request_id: str) -> bool:
        """End a request at once. False if none of that id is running or waiting."""
        return await asyncio.wrap_future(self._worker.abort(request_id))

    def _name(self, request_id: str | None) -> str:
        if request_id is None:
            return next(self._names)
        if not isinstance(request_id, str) or not request_id:
            raise OptionError(f"request_id={shown(request_id)}: a string that is not empty is needed")
        return request_id

    def _submit(
        self, stream: _Stream, prompt: Prompt, params: SamplingParams | None, priority: int, deadline: float | None
    ) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise OptionError(f"priority={shown(priority)}: a whole number is needed")
        if deadline is not None and not (isinstance(deadline, int | float) and 0 <= deadline < math.inf):
            raise OptionError(f"deadline={shown(deadline)}: seconds from now, 0 or more, or None")
        self._worker.check()
        text, ids, checked = self._llm.check(prompt, params)
        until = None if deadline is None else time.monotonic() + deadline
        stream.ticket = self._worker.submit(Submission(stream.request_id, text, ids, checked, priority, until, stream))

    # -- about

    @property
    def llm(self) -> LLM:
        """The model beneath, for its tokenizer and `info()`. Its engine belongs to the worker: do not step it."""
        return self._llm

    @property
    def num_requests(self) -> int:
        """Requests running and waiting."""
        return self._worker.num_requests

    async def stats(self) -> EngineStats:
        """Counters and the state of memory, between two steps."""
        stats: EngineStats = await asyncio.wrap_future(self._worker.call(self._llm.engine.stats))
        return stats

    # -- the end

    async def close(self, drain: bool = False) -> None:
        """Take no more requests; let those there are end first (`drain`) or end them; give memory and threads back."""
        self._worker.close(drain)
        await asyncio.to_thread(self._worker.join)

    def shutdown(self, drain: bool = False) -> None:
        """`close` for programs without an event loop. Waits."""
        self._worker.close(drain)
        self._worker.join()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(drain=kind is None)


class _Stream:
    """What the two kinds of streams share: pieces arrive by `deliver`, the last one with the output."""

    loop: Any = None

    def __init__(self, worker: Worker, request_id: str) -> None:
        self.request_id = request_id
        self.ticket: int | None = None  # the worker's, once the request was handed in
        self._worker = worker
        self._pieces: deque[StreamPiece] = deque()
        self._output: RequestOutput | None = None
        self._closed = False

    def deliver(self, pieces: list[StreamPiece], output: RequestOutput | None) -> None:
        self._pieces.extend(pieces)
        self._output = output

    def output(self) -> RequestOutput | None:
        """The whole result once the request has ended; None before."""
        return self._output

    def _abandon(self) -> None:
        """Nobody reads on: end the request if it has not."""
        if not self._closed:
            self._closed = True
            if self.ticket is not None and self._output is None:
                self._worker.abandon(self.request_id, self.ticket)

    def __del__(self) -> None:
        self._abandon()


class AsyncStream(_Stream):
    """The pieces of one request, for the event loop that made it: `async for piece in stream`."""

    def __init__(self, worker: Worker, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(worker, request_id)
        self.loop = loop
        self._news = asyncio.Event()

    def deliver(self, pieces: list[StreamPiece], output: RequestOutput | None) -> None:
        super().deliver(pieces, output)
        self._news.set()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StreamPiece:
        if asyncio.get_running_loop() is not self.loop:  # it would wait for ever
            raise OptionError(f"request {self.request_id}: its stream belongs to the event loop that made it")
        try:
            while not self._pieces:
                if self._output is not None or self._closed:
                    raise StopAsyncIteration
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            self._abandon()
            raise
        return self._pieces.popleft()

    async def result(self) -> RequestOutput:
        """Read to the end; the whole result."""
        async for _ in self:
            pass
        if self._output is None:
            raise OptionError(f"request {self.request_id}: the stream was closed before its end")
        return self._output

    async def aclose(self) -> None:
        """End the request if it still runs."""
        self._abandon()
        self._news.set()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class ThreadStream(_Stream):
    """The pieces of one request, for threads: `for piece in stream`; several may read, each piece goes to one."""

    def __init__(self, worker: Worker, request_id: str) -> None:
        super().__init__(worker, request_id)
        self._news = threading.Condition()

    def deliver(self, pieces: list[StreamPiece], output: RequestOutput | None) -> None:
        with self._news:
            super().deliver(pieces, output)
            self._news.notify_all()

    def __iter__(self) -> ThreadStream:
        return self

    def __next__(self) -> StreamPiece:
        with self._news:
            while not self._pieces:
                if self._output is not None or self._closed:
                    raise StopIteration
                self._worker.check_process()
                if self._worker.here:
                    raise OptionError(f"request {self.request_id}: a logits processor cannot wait for a result")
                self._news.wait()
            return self._pieces.popleft()

    def result(self) -> RequestOutput:
        """Read to the end; the whole result."""
        for _ in self:
            pass
        if self._output is None:
            raise OptionError(f"request {self.request_id}: the stream was closed before its end")
        return self._output

    def close(self) -> None:
        """End the request if it still runs."""
        self._abandon()
        with self._news:
            self._news.notify_all()

    def __enter__(self) -> ThreadStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop(worker: Worker) -> None:
    worker.close(drain=False)
    worker.join(10)


def _stop_weakly(reference: weakref.ref[Worker]) -> None:
    worker = reference()
    if worker is not None:
        _stop(worker)
