"""CUDA C -> C++ for g++: includes put in place, inline PTX turned into calls, kernels exported.

The text of the kernels is not changed otherwise, and #line directives keep file and line of everything.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from cudabench.errors import BenchError

INCLUDE = Path(__file__).resolve().parent / "include"

# Qualifiers of PTX that change no value: not part of the name of the C++ function for an instruction.
IGNORED = {"sync", "aligned", "volatile", "nc", "ftz"}
_CACHE_HINT = re.compile(r"\.L[12]::\w+(?:::\w+)?|::cta\b")
_SPECIAL = {"laneid": "cudabench::lane()", "tid.x": "threadIdx.x", "ctaid.x": "blockIdx.x"}
_TYPES = {"pred": "bool", "b16": "unsigned short", "u16": "unsigned short", "b32": "unsigned", "u32": "unsigned",
          "s32": "int", "f32": "float", "b64": "uint64_t", "u64": "uint64_t"}  # fmt: skip


def without_comments(text: str) -> str:
    """Comments as blanks; strings and line ends stay."""

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        return token if token[0] in "\"'" else re.sub(r"[^\n]", " ", token)

    return re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', blank, text, flags=re.S)


def with_includes(path: Path, folders: tuple[Path, ...], seen: set[Path] | None = None) -> str:
    """The file with its `#include "..."` in place, each file once. Those in <> are the bench's own, left to g++."""
    seen = set() if seen is None else seen
    seen.add(path.resolve())
    name = _told(path)
    out = [f'#line 1 "{name}"']
    for number, line in enumerate(without_comments(path.read_text(encoding="utf-8")).splitlines(), start=1):
        if re.match(r"\s*#\s*pragma\s+once", line):
            out.append("")
            continue
        match = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if match is None:
            out.append(line)
            continue
        places = [folder / match[1] for folder in (path.parent, *folders)]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise BenchError(f"{path}:{number}: {match[1]} not found")
        if found.resolve() not in seen:
            out.append(with_includes(found, folders, seen))
        out.append(f'#line {number + 1} "{name}"')
    return "\n".join(out) + "\n"


def _told(path: Path) -> str:
    """The name by which faults tell a file, the same wherever the checkout lies: part of what builds are cached by."""
    root = INCLUDE.parents[2]
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def closing(text: str, start: int, where: str) -> int:
    """Position of the parenthesis that closes the one at `start`, strings skipped."""
    depth = 0
    for match in re.finditer(r'"(?:\\.|[^"\\])*"|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return start + match.start()
    raise BenchError(f"{where}: unbalanced parentheses in asm")


def top_level(text: str, separator: str) -> list[str]:
    """Split at a separator outside of brackets and strings; `::` does not split at `:`."""
    parts, depth, last = [], 0, 0
    for match in re.finditer(rf'"(?:\\.|[^"\\])*"|[()\[\]{{}}]|::|{re.escape(separator)}', text):
        token = match[0]
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            depth -= 1
        elif depth == 0 and token == separator:
            parts.append(text[last : match.start()])
            last = match.end()
        elif depth == 0 and token == "::" and separator == ":":  # an empty section of asm
            parts += [text[last : match.start()], ""]
            last = match.end()
    return [*parts, text[last:]]


def asm_call(body: str, where: str) -> str:
    """C++ for the inside of `asm(...)`; `where` is file:line for errors."""
    sections = top_level(body, ":")
    strings = r'"(?:\\.|[^"\\])*"'
    if re.sub(strings, "", sections[0]).strip() or "#" in body:
        raise BenchError(
            f"{where}: asm with a macro in its text or an #if inside is not understood: string literals only"
        )
    template = "".join(
        token[1:-1].replace(r"\n", "\n").replace(r"\t", " ") for token in re.findall(strings, sections[0])
    )
    operands = []
    for section in sections[1:3]:
        for operand in (part.strip() for part in top_level(section, ",") if part.strip()):
            match = re.match(r'(?:\[\w+\]\s*)?"[^"]*"\s*(\(.*\))$', operand, re.S)
            if match is None:
                raise BenchError(f"{where}: asm operand not understood: {operand}")
            operands.append(" ".join(match[1].split()))
    # scopes go, operand lists stay
    template = re.sub(r"//[^\n]*", "", template)
    template = re.sub(r"\{([^{};]*)\}", lambda m: "<" + m[1] + ">", template).replace("{", " ").replace("}", " ")
    statements = [statement for line in template.split(";") for statement in _statement(line.strip(), operands, where)]
    return "do { " + " ".join(statements) + " } while (0)"


def _statement(text: str, operands: list[str], where: str) -> Iterator[str]:
    if not text:
        return
    text = " ".join(text.split())
    declaration = re.match(r"\.reg \.(\w+) (.*)$", text)
    if declaration is not None:
        if declaration[1] not in _TYPES:
            raise BenchError(f"{where}: registers of type .{declaration[1]} are not emulated")
        yield f"{_TYPES[declaration[1]]} {declaration[2]};"
        return
    guard = re.match(r"@(!?)([\w%]+) ", text)
    if guard is not None:
        yield f"if ({guard[1]}{_operand(guard[2], operands)})"
        text = text[guard.end() :]
    mnemonic, _, rest = text.partition(" ")
    mnemonic = _CACHE_HINT.sub("", mnemonic)
    name = "ptx_" + "_".join(part for part in mnemonic.split(".") if part not in IGNORED)
    if name not in known_instructions():
        raise BenchError(
            f"{where}: the PTX instruction {mnemonic} is not emulated (cudabench_ptx.h has those that are)"
        )
    flat = rest.replace("<", "").replace(">", "")
    values = [_operand(part.strip(), operands) for part in flat.split(",") if part.strip()]
    yield f"cudabench::{name}({', '.join(['CUDABENCH_HERE', *values])});"


def _operand(text: str, operands: list[str]) -> str:
    address = re.match(r"\[\s*([^\]+]+?)\s*(?:\+\s*(\d+))?\s*\]$", text)
    if address is not None:
        base = _operand(address[1], operands)
        return base if address[2] is None else f"({base} + {address[2]})"
    if text.startswith("%%"):
        return _SPECIAL[text[2:]]
    return operands[int(text[1:])] if re.match(r"%\d+$", text) else text


@functools.cache
def known_instructions() -> frozenset[str]:
    """Names of the functions in cudabench_ptx.h."""
    text = (INCLUDE / "cudabench_ptx.h").read_text()
    names = set(re.findall(r"\b(ptx_\w+)\b", text))
    names |= {
        f"ptx_{kind}_global_{t}" for kind in ("ld", "st") for t in re.findall(r"CUDABENCH_LOADS\((\w+), \w+\)", text)
    }
    names |= {f"ptx_ldmatrix_m8n8_x{n}{s}" for n in (1, 2, 4) for s in re.findall(r"CUDABENCH_LDMATRIX\((_\w+),", text)}
    return frozenset(names)


def with_calls_for_asm(text: str) -> str:
    """Every asm statement replaced by calls, line numbers kept."""
    out, last, file, base_line, base_position = [], 0, "?", 1, 0
    for match in re.finditer(
        r'^#line (\d+) "([^"]+)"\n|\b(?:asm|__asm__)\b\s*(?:volatile|__volatile__)?\s*\(', text, re.M
    ):
        if match[1] is not None:
            file, base_line, base_position = match[2], int(match[1]), match.end()
            continue
        if match.start() < last:
            continue
        line = base_line + text.count("\n", base_position, match.start())
        opening = match.end() - 1
        end = closing(text, opening, f"{file}:{line}")
        source = text[match.start() : end]
        out += [
            text[last : match.start()],
            asm_call(text[opening + 1 : end], f"{file}:{line}"),
            "\n" * source.count("\n"),
        ]
        last = end + 1
    return "".join(out) + text[last:]


def kernels_of(text: str) -> list[str]:
    """Names of the extern "C" __global__ functions."""
    bounds = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
    pattern = r'extern\s+"C"\s+__global__\s+(?:void\s+)?' + bounds + r"(?:void\s+)?(\w+)\s*\("
    return list(dict.fromkeys(re.findall(pattern, text)))


def translate(path: Path, folders: tuple[Path, ...] = ()) -> tuple[str, list[str]]:
    """(C++ source, names of its kernels) of a .cu file. `folders` are searched for its quoted includes."""
    text = with_calls_for_asm(with_includes(path, folders))
    aligned = r"(?:(?:__align__|alignas)\s*\(\s*\w+\s*\)\s*)?"
    dynamic = rf"extern\s+__shared__\s+{aligned}([\w ]+?(?:\s*\*)?)\s*\b(\w+)\s*\[\s*\]\s*;"
    text = re.sub(dynamic, r"\1 *const \2 = (\1 *)cudabench::dynamic_shared();", text)
    if re.search(r"extern\s+__shared__", text):
        raise BenchError(f"{path}: a declaration of dynamic shared memory is not understood")
    names = kernels_of(text)
    if not names:
        raise BenchError(f'{path}: no extern "C" __global__ function')
    exports = "".join(f"CUDABENCH_EXPORT({name})\n" for name in names)
    return f'#include "cudabench.h"\n{text}\n#line 1 "exports"\n{exports}', names
