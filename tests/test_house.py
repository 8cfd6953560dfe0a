"""The rules that hold the house together: who may import whom, how long a file gets, what start-up may cost."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cupaged", "kernels", "model", "cli", "bench")
MAX_LINES = 450

# Folder or file -> what of ours it may import: the first entry that matches counts. Imports run one way:
# cli -> cupaged -> {model, kernels, device, memory}.
MAY_IMPORT = {
    "cupaged/memory/": ("cupaged.memory", "cupaged.errors"),
    "cupaged/device/": ("cupaged.device", "cupaged.kernels", "cupaged.errors"),
    "cupaged/__main__.py": ("cupaged.cli",),
    "cupaged/": (
        "cupaged", "-cupaged.cli", "-cupaged.bench",
    ),
    "kernels/": ("cupaged.kernels", "cupaged.errors"),
    "model/": ("cupaged.model", "cupaged.kernels.interface", "cupaged.errors"),
    "cli/": ("cupaged",),
    "bench/": ("cupaged", "-cupaged.cli"),
}  # fmt: skip
CUPY_ROOMS = ("cupaged/device/", "kernels/cuda/")
BRINGS = {
    "numba": ("llvmlite",),
    "tokenizers": ("huggingface_hub",),
    "cupy-cuda12x": ("cupy", "cupy_backends"),
}  # import names that differ


def python_files(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_ours(module: str) -> bool:
    """Whether `cupaged.x.y` is a module, not a name in one."""
    parts = module.split(".")[1:]
    base = ROOT if parts and parts[0] in ROOMS[1:] else ROOT / "cupaged"
    place = base.joinpath(*parts)
    return place.is_dir() or place.with_suffix(".py").is_file()


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether it is imported as soon as the file is) of every import statement, those in functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    lazy = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"))
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in lazy
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import, line {node.lineno}"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield (full if module.split(".")[0] == "cupaged" and is_ours(full) else module), node not in lazy


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def allowed(file: str, module: str) -> bool:
    rules = next(rules for prefix, rules in MAY_IMPORT.items() if file.startswith(prefix))
    if module == "cupaged":  # names that __init__ gives away lead anywhere; only those above may use them
        return rules[0] == "cupaged"
    if any(rule[0] == "-" and within(module, rule[1:]) for rule in rules):
        return False
    return any(within(module, rule) for rule in rules)


def test_imports_run_one_way() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in python_files(*ROOMS)
        for module, _ in imports(path)
        if module.split(".")[0] == "cupaged" and not allowed(name_of(path), module)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("file", "module", "answer"),
    [
        ("cupaged/memory/pool.py", "cupaged.kernels.interface", False),
        ("cupaged/memory/pool.py", "cupaged.errors", True),
        ("cupaged/engine.py", "cupaged.model.decoder", True),
        ("cupaged/engine.py", "cupaged.cli.errors", False),
        ("model/decoder.py", "cupaged.kernels.interface", True),
        ("model/decoder.py", "cupaged.kernels.cpu", False),
        ("kernels/cpu/gemm.py", "cupaged.model.config", False),
        ("kernels/cpu/gemm.py", "cupaged", False),
        ("cli/info.py", "cupaged", True),
    ],
)
def test_the_import_rule_tells_right_from_wrong(file: str, module: str, answer: bool) -> None:
    assert allowed(file, module) is answer


def test_rooms_are_imported_by_their_installed_names() -> None:
    """`import kernels` works in a checkout, makes every module twice, and fails once installed."""
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in python_files(*ROOMS, "tests")
        for module, _ in imports(path)
        if module.split(".")[0] in ("kernels", "model", "cli", "bench", "tests")
    ]
    assert not wrong


def test_only_declared_packages_are_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {Requirement(text).name for text in project["dependencies"]}
    brought = {name for key in declared for name in BRINGS.get(key, ())}
    known = {"cupaged"} | declared | brought | sys.stdlib_module_names
    benches = {Requirement(text).name for text in project["optional-dependencies"]["bench"]}
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in python_files(*ROOMS)
        for module, _ in imports(path)
        if module.split(".")[0] not in (known | benches if name_of(path).startswith("bench/") else known)
    ]
    assert not wrong


def test_memory_is_standard_library_alone() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in python_files("cupaged/memory")
        for module, _ in imports(path)
        if module.split(".")[0] not in {"cupaged", *sys.stdlib_module_names}
    ]
    assert not wrong


def test_cupy_is_imported_in_its_two_rooms_and_only_when_used() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in python_files(*ROOMS)
        for module, at_once in imports(path)
        if module.split(".")[0] in ("cupy", "cupyx", "cupy_backends")
        and (at_once or not name_of(path).startswith(CUPY_ROOMS))
    ]
    assert not wrong


def test_torch_is_imported_nowhere() -> None:
    wrong = [
        name_of(path)
        for path in python_files(*ROOMS, "tests")
        for module, _ in imports(path)
        if module.split(".")[0] in ("torch", "transformers", "triton")
    ]
    assert not wrong


def test_every_folder_of_modules_is_a_package() -> None:
    """setup.py finds packages by their __init__.py."""
    folders = {path.parent for path in python_files(*ROOMS)}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def text_files() -> list[Path]:
    rooms = [path for room in (*ROOMS, "tests", "docs", ".ci") for path in (ROOT / room).rglob("*")]
    suffixes = {".py", ".cu", ".cuh", ".toml", ".md", ".sh", ".yml", ".txt"}
    named = [path for path in (*rooms, *ROOT.iterdir()) if path.suffix in suffixes or path.name in ("Makefile", "run")]
    book = ROOT / "tests" / "quality" / "alice.txt"  # not ours
    return sorted(path for path in named if path.is_file() and "__pycache__" not in path.parts and path != book)


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in text_files()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_nothing_is_left_undone_and_no_path_of_a_machine_is_named() -> None:
    undone = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "raise NotImplemented" + "Error", "xfail" + r"\("))
    folders = "|".join(("work", "farm", "root", "home/[a-z]+", "Users/[A-Za-z]+"))
    pattern = re.compile(rf"\b(?:{undone})\b|(?<![\w.$}})/])/(?:{folders})/")
    found = [
        f"{name_of(path)}:{number}: {match[0]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if (match := pattern.search(line)) is not None
    ]
    assert not found


HEAVY = ("numba", "llvmlite", "cupy", "click", "rich", "tokenizers", "jinja2", "safetensors")


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import cupaged", (*HEAVY, "numpy")),
        ("from cupaged import LLM, SamplingParams", HEAVY),
        ("import cupaged.memory", (*HEAVY, "numpy")),
    ],
)
def test_import_is_quick_and_light(statement: str, absent: tuple[str, ...], checkout_env: dict[str, str]) -> None:
    """At most 0.3 s, interpreter start left out; best of five, since the machine may be busy."""
    code = f"""
import time; start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
import json, sys; print(json.dumps([seconds, sorted(sys.modules)]))
"""
    times = []
    for _ in range(5):
        printed = subprocess.check_output([sys.executable, "-c", code], env=checkout_env)
        seconds, modules = json.loads(printed)
        assert not set(absent) & set(modules)
        times.append(seconds)
        if seconds <= 0.3:
            break
    assert min(times) <= 0.3, times


def test_torch_is_in_nobodys_dependencies() -> None:
    """Walks what is installed, from our dependencies with all extras on, as pip would."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    todo = [Requirement(text) for text in project["dependencies"] + [t for texts in extras.values() for t in texts]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            further = [Requirement(text) for text in requires(requirement.name) or ()]
        except PackageNotFoundError:  # CuPy on a CPU-only install, an extra that is not installed
            continue
        wanted = [{"extra": extra} for extra in ("", *requirement.extras)]
        todo += [r for r in further if r.marker is None or any(r.marker.evaluate(env) for env in wanted)]
    names = {name for name, _ in seen}
    assert {"numpy", "numba", "llvmlite", "tokenizers", "huggingface-hub"} <= names  # the walk does walk
    assert not names & {"torch", "pytorch", "triton", "torchvision", "transformers", "tensorflow", "jax"}
