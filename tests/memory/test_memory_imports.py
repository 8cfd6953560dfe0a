"""Memory is pure Python: the standard library, our errors, and itself."""

import ast
import sys
from pathlib import Path

import cupaged.memory


def test_memory_imports_nothing_but_the_standard_library_and_errors() -> None:
    files = sorted(Path(cupaged.memory.__file__).parent.glob("*.py"))
    assert len(files) > 1
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                ours = name == "cupaged.errors" or name.startswith("cupaged.memory.")
                assert ours or name.split(".")[0] in sys.stdlib_module_names, f"{file.name} imports {name}"
