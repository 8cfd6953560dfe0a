"""Captured steps on a GPU: operations recorded as calls, replayed one by one or as a CUDA graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from cupaged.errors import DeviceError, KernelError
from cupaged.kernels.cuda.attention_run import CudaAttentionPlan
from cupaged.kernels.cuda.operations import CudaOperations
from cupaged.kernels.interface import Array, AttentionPlan, Operations

if TYPE_CHECKING:
    from cupaged.device.cuda import CudaDevice

# A recorded operation: the function, and the arrays, numbers and plans that it was called with.
Call = tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]

# What fills arrays of the caller's and gives nothing back. Other operations run at once, captured or not.
RECORDED = (
    "embed", "take_rows", "rms_norm", "layer_norm", "head_norm", "matmul", "rope", "gated_activation", "add",
    "write_kv", "paged_attention", "dequantise",
)  # fmt: skip


class GraphUse:
    """Whether captured steps become CUDA graphs, how many did and were launched, and why they no longer do."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.made = 0
        self.launched = 0
        self.failure: str | None = None

    def give_up(self, error: DeviceError) -> None:
        """Run steps call by call from now on: the same results, later."""
        self.wanted, self.failure = False, str(error)
        warnings.warn(f"CUDA graphs are not used: {error}", RuntimeWarning, stacklevel=2)


class RecordingOperations:
    """`CudaOperations` behind a front that records calls instead of running them while a step is captured."""

    def __init__(self, plain: CudaOperations) -> None:
        self.plain = plain
        self.front = cast(Operations, _Front(plain, self))
        self.calls: list[Call] | None = None

    def begin(self) -> None:
        if self.calls is not None:
            raise DeviceError("a capture is already running")
        self.calls = []

    def end(self) -> list[Call]:
        calls, self.calls = self.calls, None
        return calls or []


class _Front:
    """Every operation of `plain`, those of RECORDED by way of the recorder."""

    def __init__(self, plain: CudaOperations, recorder: RecordingOperations) -> None:
        for name in RECORDED:
            setattr(self, name, self._recorded(getattr(plain, name), recorder))
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    @staticmethod
    def _recorded(function: Callable[..., None], recorder: RecordingOperations) -> Callable[..., None]:
        def call(*arguments: Any, **named: Any) -> None:
            if recorder.calls is None:
                function(*arguments, **named)
            else:
                recorder.calls.append((function, arguments, named))

        return call


class CudaCapture:
    """A recorded step. The first replay runs it call by call, for a chunk of a prompt is replayed once only; the second
    one makes a CUDA graph of the same launches.

    Attention plans of the capture are its own copies, whose place on the device the graph reads: `replay(plans)` fills
    it with other plans where they fit, and else records anew.
    """

    def __init__(self, device: CudaDevice, plans: Sequence[AttentionPlan]) -> None:
        self._device = device
        self._given = list(plans)
        self._plans = [_own(plan) for plan in plans]
        self._calls: list[Call] = []
        self._graph: Any = None
        self._held: list[Array] = []  # what the graph's launches use; it holds addresses
        self._ran = False  # since it was recorded: kernels are loaded, scratch is large enough

    def take(self, calls: Sequence[Call]) -> None:
        """The calls of the capture, with the capture's own plans in place of those given."""
        self._calls = _exchanged(calls, self._given, self._plans)
        self._given = []

    def replay(self, plans: Sequence[AttentionPlan] | None = None) -> None:
        device = self._device
        if plans is not None:
            self._replan(plans)
        if self._graph is None and self._ran and device.graphs.wanted:
            self._make_graph()
        if self._graph is None:
            self._run()
            self._ran = True
        else:
            device.runtime.launch_graph(self._graph, device.backend.stream)
            device.graphs.launched += 1

    def _run(self) -> None:
        for function, arguments, named in self._calls:
            function(*arguments, **named)

    def _replan(self, plans: Sequence[AttentionPlan]) -> None:
        if len(plans) != len(self._plans):
            raise KernelError(f"plans: expected {len(self._plans)} as the capture has, got {len(plans)}")
        own = [_own(plan) for plan in plans]
        refill = self._device.recorder.plain.refill_plan
        if all(refill(mine, new) for mine, new in zip(self._plans, own, strict=True)):
            return
        for mine, new in zip(self._plans, own, strict=True):
            if mine.num_tokens != new.num_tokens:
                raise KernelError(f"plans: one of {new.num_tokens} tokens in place of one of {mine.num_tokens}")
        own = [new.fresh(like=mine) for mine, new in zip(self._plans, own, strict=True)]
        self._calls = _exchanged(self._calls, self._plans, own)
        self._plans, self._graph, self._held, self._ran = own, None, [], False

    def _make_graph(self) -> None:
        runtime, backend, graphs = self._device.runtime, self._device.backend, self._device.graphs
        try:
            runtime.begin_capture(backend.stream)
            try:
                with backend.capturing() as held:
                    self._run()
            except BaseException:
                with contextlib.suppress(DeviceError):
                    runtime.end_capture(backend.stream)  # the stream runs again what it is given
                raise
            self._graph, self._held = runtime.end_capture(backend.stream), held
            graphs.made += 1
        except DeviceError as error:
            graphs.give_up(error)


def _own(plan: AttentionPlan) -> CudaAttentionPlan:
    if not isinstance(plan, CudaAttentionPlan):
        raise KernelError(f"plan: a {type(plan).__name__} was made by another set of kernels")
    return plan.fresh()


def _exchanged(calls: Sequence[Call], olds: Sequence[Any], news: Sequence[Any]) -> list[Call]:
    """The calls with new objects where old ones were arguments."""
    by_id = {id(old): new for old, new in zip(olds, news, strict=True)}
    return [
        (
            function,
            tuple(by_id.get(id(argument), argument) for argument in arguments),
            {name: by_id.get(id(argument), argument) for name, argument in named.items()},
        )
        for function, arguments, named in calls
    ]
