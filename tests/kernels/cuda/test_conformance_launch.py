"""Launches: every argument typed as the kernel's signature says, and sources that this reading understands."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from bench_support import need_emulator
from cudabench import emulate
from emulated import EmulatedBackend, emulated_operations
from kernel_support import ArraySource, paged, queries_for
from launch_calls import launches

from cupaged.errors import KernelError
from cupaged.kernels.cuda import sources
from cupaged.kernels.cuda.launch import NULL, typed_arguments
from cupaged.kernels.interface import SampleRows

RMS = {"x": np.zeros(4, np.float32), "weight": np.zeros(4, np.float32), "out": np.zeros(4, np.float32)}


def test_every_kernel_of_every_source_is_found() -> None:
    """By counting __global__ in the text, which the parser does not."""
    found = {name: sources.kernels(name) for name in sources.source_names()}
    for name, kernels in found.items():
        assert len(kernels) == sources.text(name).count("__global__") > 0, name
    expected = """paged_attention paged_attention_tensor merge_parts write_kv copy_blocks rms_norm layer_norm head_norm
        rope gated_activation add take_rows narrow_rows finish_rows matmul embed dequantise sample_max sample_weights
        sample_select sample_broken"""
    assert set(expected.split()) == {kernel for kernels in found.values() for kernel in kernels}


@need_emulator
@pytest.mark.parametrize("source", sources.source_names())
def test_K15_signatures_read_from_text_are_those_of_the_compiler(source: str) -> None:
    kinds = {"int": "int32", "float": "float32", "long long int": "int64", "unsigned int": "uint32"}
    for name, parameters in sources.kernels(source).items():
        compiled = emulate(sources.FOLDER / source, name, include=[sources.FOLDER]).signature
        assert len(compiled) == len(parameters), name
        for kind, parameter in zip(compiled, parameters, strict=True):
            expected = "pointer" if "*" in kind else kinds[kind]
            assert parameter.kind == expected, (name, parameter.name)
            if parameter.size:
                words = set(re.findall(r"\w+", kind))
                size = 1 if "char" in words else 8 if words & {"long", "double"} else 4
                assert parameter.size == size, (name, parameter.name)


def test_K15_scalars_get_the_type_of_the_signature() -> None:
    """A Python float would be 8 bytes to a kernel that takes 4."""
    typed = typed_arguments("norms.cu", "rms_norm", RMS | {"residual": None, "cols": 4, "eps": 1.0})
    assert [type(value) for value in typed[4:]] == [np.int32, np.float32]
    for eps in (1, np.float64(1), np.int64(1)):
        assert typed_arguments("norms.cu", "rms_norm", RMS | {"residual": None, "cols": 4, "eps": eps})[5] == 1.0
    with pytest.raises(KernelError, match=r"cols: 4294967296 does not fit int32"):
        typed_arguments("norms.cu", "rms_norm", RMS | {"residual": None, "cols": 1 << 32, "eps": 1.0})


def test_K14_an_absent_array_is_a_typed_null_pointer() -> None:
    typed = typed_arguments("norms.cu", "rms_norm", RMS | {"residual": None, "cols": 4, "eps": 1.0})
    assert typed[3] is NULL and NULL.nbytes == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros(4, np.float16)}, "rms_norm: x: expected an array of float32, got float16"),
        ({"x": np.zeros(4, np.int32)}, "rms_norm: x: expected an array of float32, got int32"),
        ({"x": 3}, "rms_norm: x: expected an array, got 3"),
        ({"x": np.float32(3)}, "rms_norm: x: expected an array, got np.float32(3.0)"),
        ({"x": [1.0]}, "rms_norm: x: expected an array, got [1.0]"),
        ({"cols": np.zeros(1, np.int32)}, "rms_norm: cols: expected a whole number, got an array"),
        ({"cols": 4.0}, "rms_norm: cols: expected a whole number, got 4.0"),
        ({"cols": np.float32(4)}, "rms_norm: cols: expected a whole number, got np.float32(4.0)"),
        ({"cols": True}, "rms_norm: cols: expected a whole number, got True"),
        ({"cols": None}, "rms_norm: cols: expected a whole number, got None"),
        ({"cols": -(1 << 31) - 1}, "rms_norm: cols: -2147483649 does not fit int32"),
        ({"eps": None}, "rms_norm: eps: expected a number, got None"),
        ({"eps": "1e-5"}, "rms_norm: eps: expected a number, got '1e-5'"),
        ({"eps": np.zeros(1, np.float32)}, "rms_norm: eps: expected a number, got an array"),
        ({"colls": 4}, "rms_norm: colls"),
    ],
)
def test_K15_what_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments = RMS | {"residual": None, "cols": 4, "eps": 1.0} | change
    with pytest.raises(KernelError, match=re.escape(message)):
        typed_arguments("norms.cu", "rms_norm", arguments)


@pytest.mark.parametrize("storage", [0, 1, 2])
@pytest.mark.parametrize("given", ["float32", "float16", "uint16", "int16"])
def test_K15_what_a_variant_stores_is_what_its_pointer_takes(storage: int, given: str) -> None:
    pointers = dict.fromkeys(("quants", "high", "scales", "deltas"))
    arguments = pointers | {"out": np.zeros(4, given), "first_row": 0, "cols": 4}
    expected = ("float32", "float16", "uint16")[storage]
    if given == expected:
        typed_arguments("dequantise.cu", "dequantise", arguments, {"STORAGE": storage})
    else:
        with pytest.raises(KernelError, match=f"dequantise: out: expected an array of {expected}, got {given}"):
            typed_arguments("dequantise.cu", "dequantise", arguments, {"STORAGE": storage})


def test_K15_every_launch_in_the_code_names_the_parameters_of_its_kernel() -> None:
    """Read from the text of both: whatever path of the launch layer no test takes."""
    checked = set()
    for launch in launches(sources.FOLDER):
        for source, kernel, names in launch.calls():
            parameters = {parameter.name for parameter in sources.kernels(source)[kernel]}
            assert names == parameters, (launch, kernel, sorted(names ^ parameters))
            checked.add(kernel)
    assert checked == {kernel for source in sources.source_names() for kernel in sources.kernels(source)}


@need_emulator
def test_K14_K15_every_launch_of_a_forward_pass_is_typed() -> None:
    """All operations, optional arrays given and absent; the backend sees arrays, nulls and exactly typed scalars."""

    class Recorder(EmulatedBackend):
        seen: dict[str, int]

        def kernel(self, source: str, name: str, defines: Any, shared_bytes: int) -> Any:
            run = super().kernel(source, name, defines, shared_bytes)

            def launch(grid: Any, block: Any, arguments: Any, shared: int) -> None:
                for parameter, value in zip(sources.kernels(source)[name], arguments, strict=True):
                    if isinstance(value, np.ndarray):
                        assert parameter.kind == "pointer"
                    else:
                        assert value.dtype == ("uint64" if parameter.kind == "pointer" else parameter.kind)
                self.seen[name] = self.seen.get(name, 0) + 1
                run(grid, block, arguments, shared)

            return launch

    backend = Recorder()
    backend.seen = {}
    ops = emulated_operations(backend=backend)
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 64), np.float32), np.ones(64, np.float32)
    out = np.empty_like(x)
    matrix = ops.matrix(ArraySource(rng.standard_normal((64, 64))), "float16")
    positions, table = np.arange(3, dtype=np.int32), np.ones((8, 32), np.float32)
    for optional in (None, weight):
        ops.matmul(x, matrix, out, optional)
        ops.layer_norm(x, weight, optional, 1e-5, out, None if optional is None else x.copy())
        ops.rms_norm(x, weight, 1e-5, out, None if optional is None else x.copy())
    many = np.ones((9, 64), np.float32)
    backend.gemm = lambda x, weight, product, dtype: product.fill(0)
    ops.matmul(many, matrix, np.empty_like(many), weight)
    ops.embed(positions, matrix, out)
    ops.dequantise(matrix, 0, np.empty((3, 64), np.float16), "float16")
    ops.take_rows(x, positions, out)
    ops.head_norm(x.reshape(3, 2, 32), np.ones(32, np.float32), 1e-5)
    ops.rope(x.reshape(3, 2, 32), positions, table)
    ops.gated_activation(x, "silu", np.empty((3, 32), np.float32))
    ops.add(x, out)
    setup = paged(ops, [600, 5], dtype="float16")
    for heads, sinks in ((2, None), (8, np.zeros(8, np.float32))):
        setup.run(queries_for([1, 2], heads, 64), sinks=sinks)
    ops.write_kv(
        setup.keys[1].astype(np.float32), setup.values[1].astype(np.float32), setup.view, 0, np.arange(5),
        np.arange(5, dtype=np.int32), table,
    )  # fmt: skip
    ops.copy_blocks(setup.view, [0], [1])
    ops.broken_rows(x)
    ops.sample(x, SampleRows([0.5] * 3, [3] * 3, [0.9] * 3, [0.0] * 3, [1] * 3, [0] * 3, [0] * 3))
    assert set(backend.seen) == {name for source in sources.source_names() for name in sources.kernels(source)}


def test_K18_importing_the_cuda_room_brings_neither_cupy_nor_a_context(checkout_env: dict[str, str]) -> None:
    code = """
import sys, cupaged.kernels.cuda.operations, cupaged.kernels.cuda.library, cupaged.kernels.cuda.variants
print([m for m in sys.modules if m.startswith(("cupy", "numba"))], "libcuda" in open("/proc/self/maps").read())
"""
    assert subprocess.check_output([sys.executable, "-c", code], env=checkout_env, text=True) == "[] False\n"
