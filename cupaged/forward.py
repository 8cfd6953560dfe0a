"""Forward passes of an engine: chunks in, logits out; steps captured once and replayed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.batch import StepInputs, build_batch
from cupaged.cache import PagedKVCache
from cupaged.decoding import DecodingRun
from cupaged.device.base import Capture, Device, MovingCapture
from cupaged.kernels.interface import Array, KVView
from cupaged.memory import BlockManager
from cupaged.model.config import ModelConfig
from cupaged.model.decoder import Decoder
from cupaged.step_logits import StepLogits
from cupaged.step_plan import PROMPT_ROWS, Chunk

MOST_CAPTURED = 96  # some 0.1 MiB each on a CPU


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step ready to be replayed, where it leaves its logits, and the K/V arrays that it works on."""

    step: Capture
    logits: Array
    views: list[KVView]

    def works_on(self, views: Sequence[KVView]) -> bool:
        return all(a is b for a, b in zip(self.views, views, strict=True))


class ForwardPasses:
    """A decoder with the buffers of its steps. `prefill_speed`: tokens a second of steps that are mostly prompts."""

    def __init__(
        self, config: ModelConfig, decoder: Decoder, groups: int, manager: BlockManager, device: Device,
        max_tokens: int, max_sequences: int,
    ) -> None:  # fmt: skip
        self.config = config
        self.decoder = decoder
        self.manager = manager
        self.device = device
        self.prefill_speed: float | None = None
        self.captured: dict[tuple[int, int], CapturedStep] = {}  # by tokens and wanted rows, the last used last
        self._decoding: tuple[DecodingRun, CapturedStep] | None = None  # the last step, if it was of decoding alone
        self._inputs = StepInputs(device, groups, max_tokens, max_sequences + PROMPT_ROWS)

    def run(self, chunks: Sequence[Chunk], caches: Sequence[PagedKVCache]) -> StepLogits:
        """Logits of the rows that the chunks want, in order."""
        run, self._decoding = self._decoding, None  # it is kept if this step, too, ends well
        views = [cache.view for cache in caches]
        if run is not None and run[0].follows(chunks) and self._go_on(chunks, views, *run):
            self._decoding = run
            return StepLogits(self.device, run[1].logits)
        began = time.perf_counter()
        batch = build_batch(chunks, self.manager, caches, self.config, self.device, self._inputs)
        if self.decoder.prepare(batch.max_position):
            self.captured.clear()
        # A step differs from another of as many tokens and wanted rows in nothing but what its buffers hold and in its
        # attention plans: it is captured once. Where captures are dear only steps of decoding alone are, whose sizes
        # come again and again.
        key = len(batch.token_ids), len(batch.logit_rows)
        kept = self.device.unified or all(chunk.count == chunk.rows == 1 for chunk in chunks)
        known = self.captured.pop(key, None) if kept else None
        if known is not None and known.works_on(views):
            self.captured[key] = known  # the last used one is the last
            known.step.replay(batch.all_plans)
            logits = known.logits
        else:
            with self.device.capture(batch.all_plans) as step:
                logits = self.decoder.forward(batch, views)
            step.replay()
            if kept:
                self.captured[key] = CapturedStep(step, logits, views)
                if len(self.captured) > MOST_CAPTURED:
                    del self.captured[next(iter(self.captured))]
        self._measure(chunks, began)
        decoding = kept and all(chunk.count == chunk.rows == 1 for chunk in chunks)
        captured = self.captured.get(key) if decoding else None
        if captured is not None and isinstance(captured.step, MovingCapture):
            self._decoding = DecodingRun(chunks, captured.step, self.manager, self.device, self._inputs), captured
        return StepLogits(self.device, logits)

    def _go_on(
        self, chunks: Sequence[Chunk], views: Sequence[KVView], run: DecodingRun, captured: CapturedStep
    ) -> bool:
        """Run the next step of a decoding run, if nothing hinders."""
        if self.decoder.prepare(max(chunk.start for chunk in chunks)):
            self.captured.clear()
            return False
        if not captured.works_on(views) or not run.advance():
            return False
        captured.step.replay()
        return True

    def _measure(self, chunks: Sequence[Chunk], began: float) -> None:
        """How fast prompts are computed, from steps that are mostly that: what recomputing costs."""
        tokens = sum(chunk.count for chunk in chunks)
        if tokens >= max(64, 4 * len(chunks)):
            self.device.record("compute").wait()
            speed = tokens / (time.perf_counter() - began)
            known = self.prefill_speed or speed
            self.prefill_speed = known + (speed - known) / 4
