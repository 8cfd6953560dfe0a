"""One run of `cupaged generate` on a loaded model: asks for the outputs and shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from cupaged.cli.errors import complain
from cupaged.cli.output import Output, as_json
from cupaged.cli.progress import Progress
from cupaged.cli.prompts import Prompt
from cupaged.cli.statistics import Statistics
from cupaged.errors import OptionError

if TYPE_CHECKING:
    from cupaged.llm import LLM
    from cupaged.outputs import RequestOutput, StreamPiece
    from cupaged.sampling import SamplingParams

EXCERPT = 60  # characters of a prompt in the headings of several outputs


class Job:
    """A prompt with its sampling parameters: those of the command line, or its own where it has some."""

    def __init__(self, prompt: Prompt, sampling: dict[str, Any]) -> None:
        from cupaged.sampling import SamplingParams

        self.prompt = prompt
        try:
            self.params: SamplingParams = SamplingParams(**(sampling | dict(prompt.params)))
        except OptionError as error:
            if prompt.params:
                raise OptionError(f"{prompt.where}: {error}") from None
            raise


class Session:
    """Shows the results of jobs. Each `show_` method returns how many of its requests ended with an error."""

    def __init__(
        self, llm: LLM, output: Output, progress: Progress, statistics: Statistics, chat: bool, system: str | None
    ) -> None:
        self._llm = llm
        self._output = output
        self._progress = progress
        self._statistics = statistics
        self._chat = chat
        self._system = system

    def show_stream(self, job: Job) -> int:
        """The text of one prompt as it comes. When interrupted, what was shown stays and its line is ended."""
        failed = 0
        shown_ids = 0
        with closing(cast(Any, self._stream(job))) as pieces:  # closing it aborts the request
            try:
                for piece in pieces:
                    self._progress.clear()
                    self._statistics.add_piece(piece)
                    if self._llm.tokenizer is not None:
                        self._output.write(piece.text)
                    elif piece.token_ids:
                        self._output.write(("," if shown_ids else "") + _ids_text(piece.token_ids))
                        shown_ids += len(piece.token_ids)
                    if piece.finish_reason == "error":
                        failed += 1
                        complain(f"the request failed: {piece.stop_reason or 'no reason was given'}")
            finally:
                self._output.end_line()
        return failed

    def show_texts(self, jobs: Sequence[Job]) -> int:
        """The texts of several prompts, each under a heading; the headings go where the texts go."""
        failed = 0
        for index, result in enumerate(self._results(jobs)):
            text = result.text if self._llm.tokenizer is not None else _ids_text(result.token_ids)
            self._output.write(f"{self._heading(index, jobs)}\n{text}")
            self._output.end_line()
            failed += self._complain_if_failed(index, jobs, result)
        return failed

    def show_objects(self, jobs: Sequence[Job]) -> int:
        """A JSON object a line, in the order of the prompts."""
        failed = 0
        for index, result in enumerate(self._results(jobs)):
            self._output.json(as_json(index, result))
            failed += self._complain_if_failed(index, jobs, result)
        return failed

    def _results(self, jobs: Sequence[Job]) -> Iterator[RequestOutput]:
        if self._chat:  # conversations one after the other: LLM.chat takes one
            for job in jobs:
                yield self._counted(self._llm.chat(self._messages(job), job.params))
            return
        results = self._llm.generate([job.prompt.content for job in jobs], [job.params for job in jobs])
        yield from map(self._counted, results)

    def _counted(self, result: RequestOutput) -> RequestOutput:
        self._progress.clear()
        self._statistics.add_result(result)
        return result

    def _stream(self, job: Job) -> Iterator[StreamPiece]:
        if self._chat:
            return self._llm.chat_stream(self._messages(job), job.params)
        return self._llm.stream(job.prompt.content, job.params)

    def _messages(self, job: Job) -> list[dict[str, str]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": cast(str, job.prompt.content)}]

    def _heading(self, index: int, jobs: Sequence[Job]) -> str:
        content = jobs[index].prompt.content
        text = " ".join(content.split()) if isinstance(content, str) else _ids_text(content)
        excerpt = text if len(text) <= EXCERPT else text[: EXCERPT - 3] + "..."
        return f"{'' if index == 0 else chr(10)}=== {index + 1} of {len(jobs)}: {excerpt}"

    def _complain_if_failed(self, index: int, jobs: Sequence[Job], result: RequestOutput) -> bool:
        failed = result.finish_reason == "error"
        if failed:
            place = "the request" if len(jobs) == 1 else f"prompt {index + 1} ({jobs[index].prompt.where})"
            complain(f"{place} failed: {result.error or 'no reason was given'}")
        return failed


def _ids_text(ids: Sequence[int]) -> str:
    """Token ids as --token-ids takes them."""
    return ",".join(map(str, ids))
