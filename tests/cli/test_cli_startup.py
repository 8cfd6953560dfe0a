"""What a warm start imports: the first token waits for all of it."""

from __future__ import annotations

import subprocess
import sys

from checkpoints import DATA, smollm2_gguf

# Compilers, other commands' needs, what only a terminal, a chat, a download or an error asks for.
NOT_FOR_THE_FIRST_TOKEN = {
    "numba", "llvmlite", "cupy", "rich", "jinja2", "safetensors", "zipfile", "email", "importlib.metadata",
    "subprocess",
    "cupaged.cli.info", "cupaged.cli.convert", "cupaged.cli.bench", "cupaged.cli.tokenize", "cupaged.bench",
    "cupaged.model.chat_template", "cupaged.model.convert", "cupaged.model.source_wheel", "cupaged.kernels.cpu.compile",
}  # fmt: skip


def imported(env: dict[str, str], *arguments: str) -> tuple[str, set[str]]:
    """What `cupaged generate` prints, and the modules that it has imported, kernels being in the cache."""
    code = f"""
import sys
from cupaged.cli import main
code = main(["generate", *{arguments!r}])
print(code, *sys.modules)
"""
    for _ in range(2):  # the first may compile kernels
        printed = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    *shown, last = printed.splitlines()
    code, *modules = last.split()
    assert code == "0"
    return "\n".join(shown), set(modules)


def test_the_first_token_waits_for_no_import_that_it_does_not_need(checkout_env: dict[str, str]) -> None:
    options = ("-w", str(DATA / "llama"), "--token-ids", "5,6,7", "-n", "1", "--kv-memory", "1MiB")
    shown, modules = imported(checkout_env, *options)
    assert shown.isdecimal()
    assert {"numpy", "click", "cupaged.cli.generate"} <= modules
    assert sorted(NOT_FOR_THE_FIRST_TOKEN & modules) == []


def test_a_model_is_used_without_its_tokenizer(checkout_env: dict[str, str]) -> None:
    options = ("-w", str(smollm2_gguf()), "--token-ids", "504,3575,282,4649,314", "-n", "2", "--temperature", "0")
    shown, modules = imported(checkout_env, *options, "--no-tokenizer", "--kv-memory", "4MiB")
    text, others = imported(checkout_env, *options, "--kv-memory", "4MiB")
    assert (shown, text) == ("7042,30", " Paris.")
    assert "tokenizers" in others and not {"tokenizers", "cupaged.model.gguf_tokenizer"} & modules
    assert sorted(NOT_FOR_THE_FIRST_TOKEN & others) == []
