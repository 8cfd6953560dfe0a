"""One run of `cupaged generate` on a loaded model: asks for the outputs and shows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from cupaged.cli.errors import complain
from cupaged.cli.output import Output, as_json
from cupaged.cli.progress import Progress
from cupaged.cli.prompts import Prompt
from cupaged.cli.sampling_options import from_json
from cupaged.cli.statistics import Statistics
from cupaged.errors import CapacityError, OptionError, RequestError

if TYPE_CHECKING:
    from cupaged.llm import LLM
    from cupaged.outputs import RequestOutput, StreamPiece
    from cupaged.piece_stream import PieceStream
    from cupaged.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 256
EXCERPT = 60  # characters of a prompt in the headings of several outputs


class Job:
    """A prompt with its sampling parameters: those of the command line, or its own where it has some."""

    def __init__(self, prompt: Prompt, sampling: dict[str, Any]) -> None:
        from cupaged.sampling import SamplingParams

        self.prompt = prompt
        options = sampling | from_json(dict(prompt.params))
        self.by_default = "max_tokens" not in prompt.params and sampling["max_tokens"] is None
        if self.by_default:
            options["max_tokens"] = DEFAULT_MAX_TOKENS
        try:
            self.params: SamplingParams = SamplingParams(**options)
        except OptionError as error:
            if prompt.params:
                raise OptionError(f"{prompt.where}: {error}") from None
            raise


class Session:
    """Shows the results of jobs in order, each as soon as it is there; all of them are computed together.

    Each `show_` method returns how many requests ended with an error. What an interrupt leaves running, closing the
    LLM ends.
    """

    def __init__(
        self, llm: LLM, output: Output, progress: Progress, statistics: Statistics, chat: bool, system: str | None
    ) -> None:
        self._llm = llm
        self._output = output
        self._progress = progress
        self._statistics = statistics
        self._chat = chat
        self._system = system

    def show_texts(self, jobs: Sequence[Job]) -> int:
        """Texts as they come; several stand under headings. An interrupted one keeps what was shown, its line ended."""
        failed = 0
        for index, stream in enumerate(self._start(jobs)):
            if len(jobs) > 1:
                self._output.write(self._heading(index, jobs))
            try:
                result = self._show_outputs(stream, jobs[index].params)
            finally:
                self._output.end_line()
            failed += self._complain_if_failed(index, jobs, result)
        return failed

    def _show_outputs(self, stream: PieceStream, params: SamplingParams) -> RequestOutput:
        """The outputs of one prompt in order: the one whose turn it is as it comes, what comes for others later."""
        waiting: defaultdict[int, list[StreamPiece]] = defaultdict(list)
        turn, begun = 0, False
        for piece, result in self._pieces(stream):
            waiting[piece.index].append(piece)
            while waiting[turn] and (result is not None or not params.picks):  # scores come with the result
                if params.n > 1 and not begun:
                    self._output.write(_output_heading(turn, params.n, result))
                begun = True
                pieces = waiting.pop(turn)
                for each in pieces:
                    self._output.write(self._text(each))
                if pieces[-1].finish_reason is not None:
                    self._output.end_line()
                    turn, begun = turn + 1, False
        assert result is not None  # the last piece brings it
        return result

    def show_objects(self, jobs: Sequence[Job]) -> int:
        """A JSON object a line."""
        failed = 0
        for index, stream in enumerate(self._start(jobs)):
            for _, result in self._pieces(stream):
                if result is not None:
                    self._output.json(as_json(index, jobs[index].prompt.content, result))
                    failed += self._complain_if_failed(index, jobs, result)
        return failed

    def _start(self, jobs: Sequence[Job]) -> list[PieceStream]:
        """Queue all requests, so that they run together whichever is asked first. RequestError names the prompt."""
        streams = []
        for index, job in enumerate(jobs):
            try:
                try:
                    streams.append(self._stream(job, job.params))
                except CapacityError:
                    # The default shall not stand in the way of a long prompt: without a limit the context is the limit,
                    # and here it is the smaller one.
                    if not job.by_default:
                        raise
                    streams.append(self._stream(job, replace(job.params, max_tokens=None)))
            except RequestError as error:
                if len(jobs) == 1:
                    raise
                raise type(error)(f"{_place(index, jobs)}: {error}") from None
        return streams

    def _stream(self, job: Job, params: SamplingParams) -> PieceStream:
        if self._chat:
            return self._llm.chat_stream(self._messages(job), params)
        return self._llm.stream(job.prompt.content, params)

    def _pieces(self, stream: PieceStream) -> Iterator[tuple[StreamPiece, RequestOutput | None]]:
        """The pieces of a stream, the last one with the whole result, which is gone once the stream ends."""
        for piece in stream:
            self._progress.clear()
            result = None
            if piece.usage is not None:
                result = stream.output()
                self._statistics.add(result)
            yield piece, result

    def _text(self, piece: StreamPiece) -> str:
        """The text, or the ids where the model has no tokenizer: a line of them, as --token-ids takes them."""
        if self._llm.tokenizer is not None:
            return piece.text
        comma = "" if not Output.line_is_open or not piece.token_ids else ","
        return comma + _ids_text(piece.token_ids)

    def _messages(self, job: Job) -> list[dict[str, str]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": cast(str, job.prompt.content)}]

    def _heading(self, index: int, jobs: Sequence[Job]) -> str:
        content = jobs[index].prompt.content
        text = " ".join(content.split()) if isinstance(content, str) else _ids_text(content)
        excerpt = text if len(text) <= EXCERPT else text[: EXCERPT - 3] + "..."
        gap = "\n" if index else ""
        return f"{gap}=== {index + 1} of {len(jobs)}: {excerpt}\n"

    def _complain_if_failed(self, index: int, jobs: Sequence[Job], result: RequestOutput) -> bool:
        failed = result.finish_reason == "error"
        if failed:
            where = "" if len(jobs) == 1 else f"{_place(index, jobs)}: "
            complain(f"{where}{result.error or 'the request failed'}")
        return failed


def _output_heading(index: int, count: int, result: RequestOutput | None) -> str:
    score = None if result is None else result.outputs[index].score
    return f"--- output {index + 1} of {count}" + ("" if score is None else f", score {score:.4f}") + "\n"


def _place(index: int, jobs: Sequence[Job]) -> str:
    return f"prompt {index + 1} of {len(jobs)} ({jobs[index].prompt.where})"


def _ids_text(ids: Sequence[int]) -> str:
    """Token ids as --token-ids takes them."""
    return ",".join(map(str, ids))
