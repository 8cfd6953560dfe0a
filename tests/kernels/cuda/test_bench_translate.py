"""What the bench makes of a source's text: inline PTX, includes, names of kernels; what it refuses, with the line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cudabench import BenchError
from cudabench.build import kept
from cudabench.translate import asm_call, kernels_of, translate, without_comments

KERNEL = 'extern "C" __global__ void one(float *y) {\n%s\n}\n'


def made_of(tmp_path: Path, body: str) -> str:
    source = tmp_path / "one.cu"
    source.write_text(KERNEL % body)
    return translate(source)[0]


def test_operands_keep_the_order_of_the_text() -> None:
    mma = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    asm = f'"{mma} {{%1, %0, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"'
    results = ", ".join(f'"+f"(d[{i}])' for i in range(4))
    operands = results + " : " + ", ".join(f'"r"(s{i})' for i in range(6))
    call = asm_call(f"{asm} : {operands}", "x.cu:1")
    values = call[call.index("HERE") : call.index(");")]
    assert values == (
        "HERE, (d[1]), (d[0]), (d[2]), (d[3]), (s0), (s1), (s2), (s3), (s4), (s5), (d[0]), (d[1]), (d[2]), (d[3])"
    )
    assert "cudabench::ptx_mma_m16n8k16_row_col_f32_f16_f16_f32(" in call


def test_predicates_registers_offsets_and_several_instructions() -> None:
    text = r'"{ .reg .pred p;\n setp.ne.b32 p, %2, 0;\n @!p cp.async.cg.shared.global.L2::128B [%0+32], [%1], 16;\n}" '
    call = asm_call(text + ':: "r"(to), "l"(from), "r"((int)(a ? b : c))', "x.cu:1")
    assert call.replace("CUDABENCH_HERE", "H") == (
        "do { bool p; cudabench::ptx_setp_ne_b32(H, p, ((int)(a ? b : c)), 0); "
        "if (!p) cudabench::ptx_cp_async_cg_shared_global(H, ((to) + 32), (from), 16); } while (0)"
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('\nasm("bra somewhere;");', r"one.cu:3: the PTX instruction bra is not emulated"),
        ('asm("mma.sync." SHAPE " {};" :: );', r"one.cu:2: asm with a macro in its text"),
        ('asm("{ .reg .f16 h; }");', r"one.cu:2: registers of type .f16 are not emulated"),
        ('asm("ex2.approx.f32 %0, %1;" : "=f"(a) : f);', r"one.cu:2: asm operand not understood: f"),
        ('asm("ex2.approx.f32 %0, %1;"', r"one.cu:2: unbalanced parentheses in asm"),
        ('\n#include "absent.cuh"', r"one.cu:3: absent.cuh not found"),
        ("extern __shared__ int (*odd)[];", "a declaration of dynamic shared memory is not understood"),
    ],
)
def test_what_is_not_understood_is_named_with_its_line(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        made_of(tmp_path, body)


def test_a_file_without_a_kernel_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "none.cu"
    source.write_text('// extern "C" __global__ void gone() {}\n')
    with pytest.raises(BenchError, match="no extern"):
        translate(source)


def test_includes_are_put_in_place_once_and_lines_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("#pragma once\nint a;\n")
    text = made_of(tmp_path, '#include "a.cuh"\n#include "a.cuh"\n/* two\nlines */ HERE')
    assert text.count("int a;") == 1
    lines = text.splitlines()
    markers = [i for i, line in enumerate(lines) if line.startswith("#line") and "one.cu" in line]
    here = next(i for i, line in enumerate(lines) if line.strip() == "HERE")
    last = max(i for i in markers if i < here)
    assert int(lines[last].split()[1]) + here - last - 1 == 5


def test_comments_go_and_strings_stay() -> None:
    assert without_comments('a // b\n"// c" /* d\n e */ f') == 'a     \n"// c"     \n      f'


def test_kernels_are_found_however_they_are_declared() -> None:
    text = """
extern "C" __global__ void a(int x) {}
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 2)
b(int x) {}
extern "C" __global__ __launch_bounds__(64) void c(int x) {}
__device__ void d(int x) {}
"""
    assert kernels_of(text) == ["a", "b", "c"]


def test_dynamic_shared_memory_in_its_usual_forms(tmp_path: Path) -> None:
    for form in ("float s[]", "__align__(16) unsigned char s[]", "alignas(128) uint4 s[]"):
        kind = form.split(")")[-1].removesuffix(" s[]").strip()
        text = made_of(tmp_path, f"extern __shared__ {form};")
        assert f"{kind} *const s = ({kind} *)cudabench::dynamic_shared();" in text


def test_builds_that_nobody_used_for_long_are_cleared_away(tmp_path: Path) -> None:
    old, used = tmp_path / "old.so", tmp_path / "used.so"
    for path in (old, used):
        path.touch()
        os.utime(path, (0, 0))
    assert kept(used)
    assert not kept(tmp_path / "new.so")
    assert used.exists() and not old.exists()
