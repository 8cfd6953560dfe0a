"""A stand-in for LLM behind the command line. Its behaviour is the name of its weights, such as `fake:slow-load`.

Run as a script, it is `cupaged` with this stand-in: `python fake_llm.py generate --weights fake --prompt x`.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from cupaged.errors import ModelFileError, RequestError
from cupaged.memory import GroupStats, PoolStats
from cupaged.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamPiece, Usage
from cupaged.stats import EngineStats

WORDS = [" one", " two", " three", " four", " five", " six", " seven", " eight"]


@dataclass(frozen=True)
class Event:
    stage: str
    done: int
    total: int | None = None
    unit: str = "files"


def stuck_in_compiled_code() -> None:
    """Some ten seconds without the GIL and without running Python's signal handlers, as in a long kernel."""
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 30_000_000)


def sleep_that_wraps() -> None:
    """Turns an interrupt into another exception, as Python 3.11 does with one in __set_name__."""
    try:
        time.sleep(60)
    except KeyboardInterrupt as error:
        raise RuntimeError("Error calling __set_name__") from error


def sleep_in_a_callback() -> None:
    """Called from C, where an exception goes nowhere, as LLVM calls llvmlite."""
    ctypes.CFUNCTYPE(None)(lambda: time.sleep(60))()


@dataclass
class Stream:
    result: RequestOutput
    pieces: Iterator[StreamPiece]

    def __iter__(self) -> Iterator[StreamPiece]:
        return self.pieces

    def output(self) -> RequestOutput:
        return self.result


class FakeLLM:
    """Answers every prompt with the first max_tokens of WORDS, over and over."""

    closed = 0
    params: ClassVar[list[Any]] = []  # of all requests of all models

    def __init__(self, weights: str, progress: Any, **options: Any) -> None:
        self.mode = weights.partition(":")[2]
        self.options = options
        self.results: dict[str, RequestOutput] = {}
        self.tokenizer = None if self.mode == "ids" else object()
        if self.mode == "missing":
            raise ModelFileError("no such folder: nowhere\n(looked for config.json)")
        if self.mode == "bug":
            raise TypeError("'NoneType' object is not subscriptable")
        if self.mode == "slow-load":
            progress(Event("weights", 1, 4))
            print("loading", file=sys.stderr, flush=True)
            time.sleep(60)
        if self.mode == "stuck-load":
            print("loading", file=sys.stderr, flush=True)
            stuck_in_compiled_code()
        if self.mode in ("wrapped-load", "lost-load"):
            print("loading", file=sys.stderr, flush=True)
            sleep_that_wraps() if self.mode == "wrapped-load" else sleep_in_a_callback()
        if self.mode == "compiling":
            progress(Event("kernels", 21, 44, "kernels"))
            time.sleep(1.4)
        if self.mode == "staged":
            progress(Event("weights", 1, 4))
            time.sleep(1.4)
            progress(Event("weights", 4, 4))

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        FakeLLM.closed += 1
        if self.mode == "slow-close":
            time.sleep(60)

    def info(self) -> dict[str, Any]:
        plan = {"kv_bytes_per_token": 46080, "num_blocks": 10, "kv_memory_bytes": 3 * 2**20}
        return {"kv_cache": plan, "weights": {"kept_bytes": {"Q8_0": 3 * 2**20, "float32": 2**19}}, **self.options}

    def stream(self, prompt: Any, params: Any) -> Stream:
        if prompt == "":
            raise RequestError("the prompt is empty: at least one token is needed")
        result = self._result(len(self.results), prompt, params)
        self.results[result.request_id] = result
        self.params.append(params)
        return Stream(result, self._pieces(result))

    def chat_stream(self, messages: list[dict[str, str]], params: Any) -> Stream:
        stream = self.stream("chat", params)
        stream.pieces = iter(
            [StreamPiece(stream.result.request_id, 0, repr(messages), [1], None, "stop", 0, Usage(3, 1))]
        )
        return stream

    def stats(self) -> EngineStats:
        pool = PoolStats(total=10, free=10, cached=0, used=0, shared=0, draining=0)
        return EngineStats((GroupStats(pool, 16, 0),), (4,), 0, 0, 0, 9, forks=3, copies=2, preemptions=1)

    def _pieces(self, result: RequestOutput) -> Iterator[StreamPiece]:
        if len(result.outputs) > 1:
            yield from self._interleaved(result)
            return
        for index, token in enumerate(result.token_ids):
            if index == 3 and self.mode == "slow-decode":
                time.sleep(60)
            if index == 3 and self.mode == "stuck-decode":
                stuck_in_compiled_code()
            yield StreamPiece(result.request_id, 0, WORDS[token], [token])
        yield StreamPiece(result.request_id, 0, "", [], None, result.finish_reason, None, result.usage)

    def _interleaved(self, result: RequestOutput) -> Iterator[StreamPiece]:
        """Token by token, one of each output; where they are picked, each whole."""
        for place in range(max(len(each.token_ids) for each in result.outputs)):
            for each in result.outputs:
                if each.score is None and place < len(each.token_ids):
                    token = each.token_ids[place]
                    yield StreamPiece(result.request_id, each.index, WORDS[token], [token])
        for each in result.outputs:
            text, ids = ("", []) if each.score is None else (each.text, each.token_ids)
            usage = result.usage if each is result.outputs[-1] else None
            yield StreamPiece(result.request_id, each.index, text, ids, None, each.finish_reason, None, usage)

    def _result(self, index: int, prompt: Any, params: Any) -> RequestOutput:
        ids = [i % len(WORDS) for i in range(params.max_tokens)]
        logprobs = None if params.logprobs is None else [{i: float("nan"), 7: float("-inf")} for i in ids]
        failed = self.mode == "failing" and index == 1
        completion = CompletionOutput(
            0, "".join(WORDS[i] for i in ids), ids, None, logprobs, "error" if failed else "length"
        )
        if params.picks:
            completion.score = -0.25
        others = [
            CompletionOutput(
                number, "".join(WORDS[i + number] for i in ids), [i + number for i in ids],
                finish_reason="length", score=-0.25 - number if params.picks else None,
            )
            for number in range(1, params.n)
        ]  # fmt: skip
        now = time.monotonic()
        times = RequestMetrics(now, now, now + 0.25, now + 1)
        text = prompt if isinstance(prompt, str) else None
        return RequestOutput(
            f"r{index}", text, [1, 2, 3], [completion, *others], Usage(3, len(ids), 1), times,
            error="step 5: logits are not finite" if failed else None,
        )  # fmt: skip


if __name__ == "__main__":
    from cupaged.cli import main, runtime

    runtime.open_llm = FakeLLM
    sys.exit(main())
