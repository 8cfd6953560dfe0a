"""`cupaged info`: what is here to run on, and what a model would take."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

import cupaged
from cupaged.cli import runtime
from cupaged.cli.output import Output
from cupaged.cli.progress import Progress
from cupaged.errors import OptionError

PACKAGES = (
    "numpy", "numba", "llvmlite", "safetensors", "tokenizers", "jinja2", "cupy-cuda12x", "cupy-cuda13x",
)  # fmt: skip
# The vector extensions that kernels choose between, as Linux spells them.
CPU_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "sve")


@click.command(short_help="Show this machine, or a model and its memory plan.")
@runtime.model_options(required=False)
@click.option("--json", "as_object", is_flag=True, help="One JSON object.")
@runtime.debug_option
def info(weights: str | None, as_object: bool, **options: Any) -> int:
    """Show versions, processor, memory, GPU and folders; with --weights also the model and its memory plan.

    The memory plan says what a token of context takes, how many KV blocks there are, and how many tokens fit.
    """
    output = Output()
    facts = system()
    if weights is not None:
        with Progress() as progress, runtime.open_llm(weights, progress=progress, **options) as llm:
            facts |= llm.info()
    else:
        ctx = click.get_current_context()
        given = [name for name in options if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT]
        if given:
            raise OptionError(f"--{given[0].replace('_', '-')} needs --weights")
    if as_object:
        output.json(facts, indent=2)
    else:
        output.write("\n".join(lines(facts)) + "\n")
    return 0


def system() -> dict[str, Any]:
    """Versions, processor, GPU and folders of this machine. Touches no GPU, and imports neither Numba nor CuPy."""
    from cupaged.device.cpu import host_memory, processor_name, usable_processors
    from cupaged.kernels.cpu.library import cache_folders
    from cupaged.model.source import cache_folder

    total, available = host_memory()
    return {
        "versions": {"cupaged": cupaged.__version__, "python": platform.python_version(), **_package_versions()},
        "cpu": {
            "name": processor_name(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "usable_processors": usable_processors(),
            "features": _features(),
        },
        "host_memory": {"total_bytes": total, "available_bytes": available},
        "gpu": _gpu(),
        "folders": {"models": str(cache_folder() / "models"), "kernels": [str(folder) for folder in cache_folders()]},
    }


def _package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _features() -> list[str]:
    """Which of CPU_FEATURES Linux names; elsewhere none, which says nothing about the processor."""
    words = _read(Path("/proc/cpuinfo")).partition("\n\n")[0].split()
    return [name for name in CPU_FEATURES if name in words]


def _gpu() -> dict[str, Any]:
    """Whether a GPU can be used and why not, from the driver itself (no CUDA context is made) and from /proc."""
    from cupaged.device import driver, why_no_gpu

    reason = why_no_gpu()
    folder = Path("/proc/driver/nvidia")
    about = _read(folder / "version").partition("\n")[0].removeprefix("NVRM version:").strip()
    cards = [_read(path) for path in sorted(folder.glob("gpus/*/information"))]
    names = [dict(_pair(line) for line in card.splitlines() if ":" in line).get("Model", "unknown") for card in cards]
    found: dict[str, Any] = {"usable": reason is None, "reason": reason, "driver": about or None, "cards": names}
    if reason is None:
        from cupaged.kernels.cuda import cublas

        card = driver.find_card()
        found |= {
            "card": card.name,
            "memory_bytes": card.total_bytes,
            "compute_capability": f"{card.capability // 10}.{card.capability % 10}",
            "driver_cuda": f"{card.cuda // 1000}.{card.cuda % 1000 // 10}",
            "cublas": cublas.found(driver.installed_wheel() or None),
        }
    return found


def _pair(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def lines(facts: dict[str, Any], depth: int = 0, all_bytes: bool = False) -> Iterator[str]:
    """`facts` as indented `key: value` lines; keys that end in `bytes`, and what is below them, also get a size that
    can be read."""
    width = max((len(key) for key, value in facts.items() if not isinstance(value, dict)), default=0)
    indent = "  " * depth
    for key, value in facts.items():
        label = key if all_bytes else key.replace("_", " ")  # names of formats keep theirs
        if isinstance(value, dict):
            yield f"{indent}{label}"
            yield from lines(value, depth + 1, key.endswith("bytes"))
        else:
            shown = _shown("bytes" if all_bytes else key, value)
            yield f"{indent}{label:<{width}}  {shown}"


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_shown("", item) for item in value) or "none"
    if isinstance(value, int) and (key == "bytes" or "bytes" in key.split("_")) and value >= 1024:
        return f"{value} ({_size(value)})"
    return str(value)


def _size(count: int) -> str:
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
