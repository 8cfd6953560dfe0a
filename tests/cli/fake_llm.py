"""A stand-in for LLM behind the command line. Its behaviour is the name of its weights, such as `fake:slow-load`.

Run as a script, it is `cupaged` with this stand-in: `python fake_llm.py generate --weights fake --prompt x`.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cupaged.errors import ModelFileError, RequestError
from cupaged.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamPiece, Usage

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


class FakeLLM:
    """Answers every prompt with the first max_tokens of WORDS, over and over."""

    closed = 0

    def __init__(self, weights: str, progress: Any, **options: Any) -> None:
        self.mode = weights.partition(":")[2]
        self.options = options
        self.prompts: list[Any] = []
        self.tokenizer = None if self.mode == "ids" else object()
        if self.mode == "missing":
            raise ModelFileError("no such folder: nowhere\n(looked for config.json)")
        if self.mode == "bug":
            raise TypeError("'NoneType' object is not subscriptable")
        if self.mode == "slow-load":
            progress(Event("loading weights", 1, 4))
            print("loading", file=sys.stderr, flush=True)
            time.sleep(60)
        if self.mode == "stuck-load":
            print("loading", file=sys.stderr, flush=True)
            stuck_in_compiled_code()
        if self.mode == "staged":
            progress(Event("loading weights", 1, 4))
            time.sleep(1.4)
            progress(Event("loading weights", 4, 4))

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        FakeLLM.closed += 1
        if self.mode == "slow-close":
            time.sleep(60)

    def info(self) -> dict[str, Any]:
        return {"memory": {"kv_bytes_per_token": 46080, "num_blocks": 10, "kv_memory_bytes": 3 * 2**20}, **self.options}

    def generate(self, prompts: list[Any], params: list[Any]) -> list[RequestOutput]:
        self.prompts = prompts
        return [self._result(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]

    def stream(self, prompt: Any, params: Any) -> Iterator[StreamPiece]:
        if prompt == "":
            raise RequestError("the prompt is empty: at least one token is needed")
        result = self._result(0, prompt, params)
        last = len(result.token_ids) - 1
        for index, token in enumerate(result.token_ids):
            if index == 3:
                if self.mode == "slow-decode":
                    time.sleep(60)
                if self.mode == "stuck-decode":
                    stuck_in_compiled_code()
            if index == 2 and self.mode == "failing":
                yield StreamPiece("r0", 0, "", [], None, "error", usage=result.usage)
                return
            text = WORDS[token]
            if index < last:
                yield StreamPiece("r0", 0, text, [token])
            else:
                yield StreamPiece("r0", 0, text, [token], None, "length", None, result.usage)

    def chat(self, messages: list[dict[str, str]], params: Any) -> RequestOutput:
        return self._result(0, repr(messages), params)

    def chat_stream(self, messages: list[dict[str, str]], params: Any) -> Iterator[StreamPiece]:
        yield StreamPiece("r0", 0, repr(messages), [1], None, "stop", 0, Usage(3, 1))

    def _result(self, index: int, prompt: Any, params: Any) -> RequestOutput:
        ids = [i % len(WORDS) for i in range(params.max_tokens)]
        logprobs = None if params.logprobs is None else [{i: float("nan"), 7: float("-inf")} for i in ids]
        failed = self.mode == "failing" and index == 1
        completion = CompletionOutput(
            0, "".join(WORDS[i] for i in ids), ids, None, logprobs, "error" if failed else "length"
        )
        now = time.monotonic()
        times = RequestMetrics(now, now, now + 0.25, now + 1)
        text = prompt if isinstance(prompt, str) else None
        return RequestOutput(
            f"r{index}", text, [1, 2, 3], [completion], Usage(3, len(ids), 1), times,
            error="step 5: logits are not finite" if failed else None,
        )  # fmt: skip


if __name__ == "__main__":
    from cupaged.cli import main, runtime

    runtime.open_llm = FakeLLM
    sys.exit(main())
