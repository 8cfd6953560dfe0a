"""Writing results to stdout: text as it comes, or one JSON object a line."""

from __future__ import annotations

import errno
import json
import math
import sys
from typing import Any, ClassVar

from cupaged.cli.errors import OutputClosedError
from cupaged.errors import CupagedError
from cupaged.outputs import CompletionOutput, RequestMetrics, RequestOutput

# A model may write anything, escape sequences included, which a terminal would obey. Line breaks and tabs stay.
_VISIBLE_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"}
_VISIBLE_CONTROLS |= {127: "\u2421"} | dict.fromkeys(range(128, 160), "\ufffd")


class Output:
    """stdout, flushed at every write. Raises OutputClosedError once nobody reads it."""

    line_is_open: ClassVar[bool] = False  # the last character written to stdout was no line break

    def __init__(self) -> None:
        if sys.stdout is None:
            raise CupagedError("standard output is closed")
        self._stream = sys.stdout
        Output.line_is_open = False
        self.is_terminal = self._stream.isatty()
        encoding = (getattr(self._stream, "encoding", None) or "utf-8").lower().replace("-", "")
        self._ascii_json = encoding != "utf8"
        if hasattr(self._stream, "reconfigure"):  # a terminal that lacks a character shows `?`, it does not stop us
            self._stream.reconfigure(errors="replace")

    def write(self, text: str) -> None:
        if not text:
            return
        Output.line_is_open = not text.endswith("\n")
        try:
            self._stream.write(text.translate(_VISIBLE_CONTROLS) if self.is_terminal else text)
            self._stream.flush()
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EINVAL):  # EINVAL: Windows' word for a broken pipe
                raise OutputClosedError from error
            raise

    def end_line(self) -> None:
        """Start a new line, unless the last character written was a line break."""
        if Output.line_is_open:
            self.write("\n")

    def json(self, value: Any, indent: int | None = None) -> None:
        """Write `value` as JSON and a line break; numbers that JSON has no word for (NaN, infinities) become null."""
        self.write(json.dumps(finite(value), ensure_ascii=self._ascii_json, allow_nan=False, indent=indent) + "\n")


def finite(value: Any) -> Any:
    """`value` with dictionaries and lists rebuilt and every NaN or infinity replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def as_json(index: int, prompt: str | list[int], output: RequestOutput) -> dict[str, Any]:
    """The JSON object of one request. `index` counts the prompts from 0; of a chat, `prompt` is the user's message.

    Text, ids and what else belongs to an output are those of the first; where there are several, "outputs" holds all.
    """
    first, *others = output.outputs
    fields = {
        "index": index,
        "request_id": output.request_id,
        "prompt": prompt if isinstance(prompt, str) else None,
        "prompt_token_ids": output.prompt_token_ids,
        **_completion(first),
        "error": output.error,
        "prompt_logprobs": output.prompt_logprobs,
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "cached_tokens": output.usage.cached_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "total_tokens": output.usage.total_tokens,
        },
        "metrics": durations(output.metrics),
    }
    if others:
        fields["outputs"] = [{"index": each.index, **_completion(each)} for each in output.outputs]
    return fields


def _completion(output: CompletionOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "score": output.score,
        "cumulative_logprob": output.cumulative_logprob,
        "logprobs": output.logprobs,
    }


def durations(metrics: RequestMetrics) -> dict[str, float | int | None]:
    """Seconds from the arrival of a request to each event (None: it did not happen), and what its memory cost."""

    def since_arrival(time: float | None) -> float | None:
        return None if time is None else round(time - metrics.arrival_time, 6)

    return {
        "scheduled_seconds": since_arrival(metrics.first_scheduled_time),
        "first_token_seconds": since_arrival(metrics.first_token_time),
        "finished_seconds": since_arrival(metrics.finished_time),
        "preemptions": metrics.preemptions,
        "forks": metrics.forks,
        "copies_on_write": metrics.copies_on_write,
    }
