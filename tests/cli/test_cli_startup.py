"""What a warm start imports: the first token waits for all of it."""

from __future__ import annotations

import subprocess
import sys

from checkpoints import DATA

# Compilers, other commands' needs, what only a terminal, a chat, a download or an error asks for.
NOT_FOR_THE_FIRST_TOKEN = {
    "numba", "llvmlite", "cupy", "rich", "jinja2", "safetensors", "zipfile", "email", "importlib.metadata",
    "subprocess",
    "cupaged.cli.info", "cupaged.cli.convert", "cupaged.cli.bench", "cupaged.cli.tokenize", "cupaged.bench",
    "cupaged.model.chat_template", "cupaged.model.convert", "cupaged.model.source_wheel", "cupaged.kernels.cpu.compile",
}  # fmt: skip


def test_the_first_token_waits_for_no_import_that_it_does_not_need(checkout_env: dict[str, str]) -> None:
    code = f"""
import sys
from cupaged.cli import main
code = main(["generate", "-w", {str(DATA / "llama")!r}, "--token-ids", "5,6,7", "-n", "1", "--kv-memory", "1MiB"])
print(code, *sys.modules)
"""
    for _ in range(2):  # the first may compile kernels
        printed = subprocess.check_output([sys.executable, "-c", code], env=checkout_env, text=True)
    ids, last = printed.splitlines()
    code, *modules = last.split()
    assert (ids.isdecimal(), code) == (True, "0")
    assert {"numpy", "click", "cupaged.cli.generate"} <= set(modules)
    assert sorted(NOT_FOR_THE_FIRST_TOKEN & set(modules)) == []
