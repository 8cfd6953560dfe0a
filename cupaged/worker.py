"""The thread that owns an engine, and what others hand it: requests, aborts, the end.

Callers on any thread put commands in a mailbox; the worker takes all of them between two steps. Pieces go to the
readers of their requests in one delivery per step and event loop. Nothing here waits on a reader: one who is slow finds
its pieces waiting, a token each at most.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from cupaged.errors import CupagedError, DeviceError, QueueFullError, RequestError, shown
from cupaged.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamPiece, Usage
from cupaged.sampling import SamplingParams

if TYPE_CHECKING:
    from cupaged.llm import LLM


class Reader(Protocol):
    """Where a request's pieces go. `deliver` is called by the worker, and must neither wait nor raise.

    The worker keeps no reader alive: one that nobody else holds is collected, and ends its request (`abandon`).
    """

    loop: Any  # an asyncio event loop, or None

    def deliver(self, pieces: list[StreamPiece], output: RequestOutput | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its way to the worker. `deadline`: on time.monotonic()'s clock, None for none."""

    request_id: str
    text: str | None
    ids: Sequence[int]
    params: SamplingParams
    priority: int
    deadline: float | None
    reader: Reader


@dataclass(frozen=True, slots=True)
class _Reading:
    """Who reads a request. An id may be used again once its request has ended; a ticket is of one request alone."""

    ticket: int
    reader: weakref.ref[Reader]


@dataclass(slots=True)
class _Mailbox:
    """Commands not yet taken. Guarded by `ready`."""

    ready: threading.Condition = field(default_factory=threading.Condition)
    commands: deque[Callable[[], None]] = field(default_factory=deque)
    open: bool = True  # False: no more requests
    stop: bool = False


class Worker:
    """Runs the steps of one LLM's engine on a thread of its own. All public methods may be called from any thread."""

    def __init__(self, llm: LLM, max_requests: int) -> None:
        self._llm = llm
        self._max_requests = max_requests
        self._mail = _Mailbox()
        self._readers: dict[str, _Reading] = {}  # of requests that have not ended; guarded by the mailbox's lock
        self._tickets = count()
        self._deadlines: list[tuple[float, int, str]] = []  # when, ticket, request id
        self._broken: BaseException | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="cupaged-engine", daemon=True)
        llm._owner = self._thread
        self._thread.start()

    # -- called by others

    def check(self) -> None:
        """DeviceError if no request can be handed in: the engine was closed, has stopped, or stayed with a parent."""
        self.check_process()
        with self._mail.ready:
            self._check_open()

    def submit(self, submission: Submission) -> int:
        """Hand in a request that was checked; its ticket. QueueFullError, RequestError (id in use) or DeviceError
        (closed)."""
        self.check_process()
        with self._mail.ready:
            self._check_open()
            if submission.request_id in self._readers:
                raise RequestError(f"request id {shown(submission.request_id)} is in use")
            if len(self._readers) >= self._max_requests:
                raise QueueFullError(
                    f"{len(self._readers)} requests are running or waiting, max_requests={self._max_requests}; "
                    "try again later"
                )
            ticket = next(self._tickets)
            self._readers[submission.request_id] = _Reading(ticket, weakref.ref(submission.reader))
            self._post(lambda: self._add(submission, ticket))
            return ticket

    def abort(self, request_id: str) -> Future[bool]:
        """Have a request ended; the future tells whether it was running or waiting."""
        self.check_process()
        done: Future[bool] = Future()

        def command() -> None:
            ended = self._llm.engine.abort(request_id)
            if done.set_running_or_notify_cancel():  # else whoever asked was cancelled meanwhile
                done.set_result(ended)

        with self._mail.ready:
            if request_id not in self._readers or self._mail.stop:
                done.set_result(False)
            else:
                self._post(command)
        return done

    def abandon(self, request_id: str, ticket: int) -> None:
        """`abort` where nobody reads on, from wherever a garbage collector runs: waits for nothing."""
        if self._pid == os.getpid():
            with self._mail.ready:  # reentrant: this very thread may hold it
                if self._reads(request_id, ticket) and not self._mail.stop:
                    self._post(lambda: self._drop(request_id, ticket))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have something done between two steps, by the thread that owns the engine."""
        self.check_process()
        done: Future[Any] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except Exception as error:  # the caller's, not the worker's
                done.set_exception(error)

        with self._mail.ready:
            self._check_open()
            self._post(command)
        return done

    @property
    def num_requests(self) -> int:
        with self._mail.ready:
            return len(self._readers)

    def close(self, drain: bool) -> None:
        """Refuse new requests; let those there are end (`drain`) or end them. Returns at once; see `join`."""
        if self._pid != os.getpid():
            return  # the parent's
        with self._mail.ready:
            self._mail.open = False
            self._mail.stop = self._mail.stop or not drain
            self._mail.ready.notify()

    @property
    def here(self) -> bool:
        """Whether the caller is this very thread (a logits processor), which must not wait for itself."""
        return threading.current_thread() is self._thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the worker's end, after `close`. False if it still runs."""
        if self._pid == os.getpid() and not self.here:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _reads(self, request_id: str, ticket: int) -> bool:
        reading = self._readers.get(request_id)
        return reading is not None and reading.ticket == ticket

    def _post(self, command: Callable[[], None]) -> None:
        self._mail.commands.append(command)
        self._mail.ready.notify()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise DeviceError(f"the engine has stopped: {self._cause}")
        if not self._mail.open:
            raise DeviceError("this engine was closed")

    @property
    def _cause(self) -> str:
        error = self._broken
        return str(error) if isinstance(error, CupagedError) else f"{type(error).__name__}: {error}".rstrip(": ")

    def check_process(self) -> None:
        """DeviceError in a process that was forked since: whoever waited for a piece there would wait for ever."""
        if self._pid != os.getpid():
            raise DeviceError(
                "this process was forked after the engine was made, and its worker thread stayed with the parent; "
                "make an engine here, or start processes with the spawn method"
            )

    # -- the thread

    def _run(self) -> None:
        engine = self._llm.engine
        try:
            while True:
                with self._mail.ready:
                    while not (self._mail.commands or engine.has_work or self._finished()):
                        self._mail.ready.wait()
                    commands, self._mail.commands = self._mail.commands, deque()
                    stop = self._mail.stop
                while commands:  # none is kept once it has run: it holds the reader that it came from
                    commands.popleft()()
                if stop:
                    self._abort_all()
                self._abort_late()
                if engine.has_work:
                    self._dispatch(engine.step())
                else:
                    with self._mail.ready:
                        if self._finished():
                            return
        except BaseException as error:  # an engine that cannot go on: everybody is told
            self._broken = error
        finally:
            self._end_all()
            with suppress(CupagedError):  # a device that is broken says so once more; everybody has been told
                self._llm.close()

    def _finished(self) -> bool:
        return not (self._mail.open or self._mail.commands or self._readers)

    def _add(self, submission: Submission, ticket: int) -> None:
        request_id = submission.request_id
        try:
            self._llm.engine.add_request(
                submission.ids, submission.params, request_id, submission.text, priority=submission.priority
            )
        except CupagedError as error:  # checked before; but what fits may have changed
            self._tell_error(request_id, str(error))
            return
        if submission.deadline is not None:
            heapq.heappush(self._deadlines, (submission.deadline, ticket, request_id))

    def _drop(self, request_id: str, ticket: int) -> None:
        with self._mail.ready:
            if not self._reads(request_id, ticket):  # it ended meanwhile; its id may be another request's by now
                return
            del self._readers[request_id]
        self._llm.engine.forget(request_id)

    def _abort_late(self) -> None:
        """End the requests whose deadline has passed."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ticket, request_id = heapq.heappop(self._deadlines)
            if self._reads(request_id, ticket):
                self._llm.engine.abort(request_id, "deadline")

    def _abort_all(self) -> None:
        with self._mail.ready:
            names = list(self._readers)
        for name in names:
            self._llm.engine.abort(name)

    def _dispatch(self, pieces: Sequence[StreamPiece]) -> None:
        by_request: dict[str, list[StreamPiece]] = {}
        for piece in pieces:
            by_request.setdefault(piece.request_id, []).append(piece)
        by_loop: dict[Any, list[Callable[[], None]]] = {}
        for request_id, own in by_request.items():
            with self._mail.ready:
                reading = self._readers.get(request_id)
            output = None
            if own[-1].usage is not None:
                output = self._llm.engine.request(request_id).output()
                self._llm.engine.forget(request_id)
                with self._mail.ready:
                    self._readers.pop(request_id, None)
            reader = None if reading is None else reading.reader()
            if reader is not None:
                by_loop.setdefault(reader.loop, []).append(partial(reader.deliver, own, output))
        for loop, deliveries in by_loop.items():
            _deliver(loop, deliveries)

    def _tell_error(self, request_id: str, message: str) -> None:
        """The one terminal piece of a request that the engine does not know, or no longer."""
        with self._mail.ready:
            reading = self._readers.pop(request_id, None)
        reader = None if reading is None else reading.reader()
        if reader is not None:
            usage = Usage(0, 0)
            piece = StreamPiece(request_id, 0, "", finish_reason="error", usage=usage)
            outputs = [CompletionOutput(0, "", [], finish_reason="error")]
            metrics = RequestMetrics(time.monotonic())
            output = RequestOutput(request_id, None, [], outputs, usage, metrics, error=message)
            _deliver(reader.loop, [partial(reader.deliver, [piece], output)])

    def _end_all(self) -> None:
        """Nobody is left waiting, however the thread ends."""
        with self._mail.ready:
            self._mail.open = False
            self._mail.stop = True
            commands, self._mail.commands = self._mail.commands, deque()
        for command in commands:
            with suppress(BaseException):  # the engine may be gone; who waits is told below
                command()
        with self._mail.ready:
            names = list(self._readers)
        for name in names:
            self._tell_error(name, f"request {name}: the engine has stopped: {self._cause}")


def _deliver(loop: Any, deliveries: list[Callable[[], None]]) -> None:
    """On the loop's thread all at once, or here where there is no loop."""

    def all_of_them() -> None:
        for delivery in deliveries:
            delivery()

    if loop is None:
        all_of_them()
        return
    with suppress(RuntimeError):  # the loop was closed: nobody reads there any more
        loop.call_soon_threadsafe(all_of_them)
