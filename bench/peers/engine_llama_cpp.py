"""llama.cpp, through llama-cpp-python's plain bindings of its C interface, from a GGUF file.

Variants: "" (the file as it is), "q4_0" and "f32" (the file requantised by llama.cpp itself, `prepare`). Several
streams are sequences of one batch, as its own server runs them. K/V are float16, its default.
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

BATCH = 2048  # tokens in a call, its default
MICRO_BATCH = 512  # its default: tokens computed together


_silent: Any = None  # the callback that llama.cpp keeps a pointer to


def _quiet(llama: Any) -> None:
    global _silent
    _silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(_silent, ctypes.c_void_p(0))


def prepare(weights: str, folder: str, variant: str) -> str:
    """The file in another precision. Q4_0 leaves no larger tensor behind: all matrices, the embedding too."""
    if not variant:
        return weights
    target = Path(folder) / f"{Path(weights).stem}-to-{variant}.gguf"
    if not target.is_file():
        llama = importlib.import_module("llama_cpp")
        _quiet(llama)
        params = llama.llama_model_quantize_default_params()
        params.ftype = {"q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0, "f32": llama.LLAMA_FTYPE_ALL_F32}[variant]
        params.allow_requantize = True
        params.pure = True
        part = target.with_suffix(".part")
        if llama.llama_model_quantize(weights.encode(), str(part).encode(), ctypes.byref(params)) != 0:
            raise RuntimeError(f"llama.cpp cannot make {variant} of {weights}")
        part.rename(target)
    return str(target)


class Engine:
    def __init__(self, weights: str, threads: int, variant: str, text: bool) -> None:
        self._llama = llama = importlib.import_module("llama_cpp")
        self._numpy = importlib.import_module("numpy")
        _quiet(llama)
        llama.llama_backend_init()
        self.version = f"llama-cpp-python {llama.__version__}"
        self._threads = threads
        self._model = llama.llama_model_load_from_file(weights.encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {weights}")
        self._vocab = llama.llama_model_get_vocab(self._model)
        self._size = llama.llama_vocab_n_tokens(self._vocab)
        self._contexts: dict[tuple[int, int, bool], Any] = {}
        self._context: Any = None

    def _open(self, sequences: int, length: int, share: bool) -> None:
        """A context for so many sequences of so many tokens. share: one K/V buffer for all, so that a prefix can be
        shared; otherwise each has its own, where attention looks at no other sequence's cells. Kept for later calls."""
        llama = self._llama
        shape = (sequences, -(-length // 256) * 256, share)
        if shape not in self._contexts:
            params = llama.llama_context_default_params()
            params.n_ctx = sequences * shape[1]
            params.n_batch = BATCH
            params.n_ubatch = MICRO_BATCH
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self._threads
            params.kv_unified = share
            params.no_perf = True
            context = llama.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"llama.cpp refuses a context of {params.n_ctx} tokens")
            self._contexts[shape] = context
        self._context = self._contexts[shape]
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: (token, position, sequence, whether its logits are wanted)."""
        llama = self._llama
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            batch = llama.llama_batch_init(len(part), 0, 1)
            try:
                batch.n_tokens = len(part)
                for i, (token, position, sequence, wanted) in enumerate(part):
                    batch.token[i] = token
                    batch.pos[i] = position
                    batch.n_seq_id[i] = 1
                    batch.seq_id[i][0] = sequence
                    batch.logits[i] = wanted
                if llama.llama_decode(self._context, batch) != 0:
                    raise RuntimeError("llama_decode failed")
            finally:
                llama.llama_batch_free(batch)

    def _logits(self, rows: int) -> Any:
        pointer = self._llama.llama_get_logits(self._context)
        return self._numpy.ctypeslib.as_array(pointer, shape=(rows, self._size))

    def _ids(self, text: str) -> list[int]:
        data = text.encode()
        tokens = (self._llama.llama_token * (len(data) + 8))()
        count = self._llama.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), True, True)
        return list(tokens[:count])

    def first(self, prompt: Any) -> None:
        ids = self._ids(prompt) if isinstance(prompt, str) else prompt
        self._open(1, 2048, True)
        self._decode([(t, i, 0, i == len(ids) - 1) for i, t in enumerate(ids)])
        token = int(self._logits(1).argmax())
        piece = ctypes.create_string_buffer(64)
        self._llama.llama_token_to_piece(self._vocab, token, piece, len(piece), 0, False)

    def run(self, prompts: list[list[int]], new: int, samples: int) -> int:
        llama = self._llama
        length = len(prompts[0])
        streams = len(prompts) * samples
        self._open(streams, length + new, samples > 1 or streams == 1)
        rows = [(token, i, stream) for stream, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
        self._decode([(*row, row[1] == length - 1) for row in rows])
        if samples == 1:
            tokens = self._logits(streams).argmax(1)
        else:
            memory = llama.llama_get_memory(self._context)
            for sample in range(1, samples):
                llama.llama_memory_seq_cp(memory, 0, sample, -1, -1)
            chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
            for part in (llama.llama_sampler_init_temp(1.0), llama.llama_sampler_init_dist(1)):
                llama.llama_sampler_chain_add(chain, part)
            tokens = [llama.llama_sampler_sample(chain, self._context, -1) for _ in range(samples)]
        for step in range(new - 1):
            self._decode([(int(token), length + step, stream, True) for stream, token in enumerate(tokens)])
            if samples == 1:
                tokens = self._logits(streams).argmax(1)
            else:
                tokens = [llama.llama_sampler_sample(chain, self._context, i) for i in range(samples)]
        if samples > 1:
            llama.llama_sampler_free(chain)
        return streams * new
