"""The runtimes that can be compared, and the files that each of them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cupaged.errors import ModelFileError, OptionError

OURS = "cupaged"


@dataclass(frozen=True, slots=True)
class Runtime:
    """A name of `--peers`. group: only runtimes of one group are compared. takes: "file" the weights as given, "gguf"
    the same but only a GGUF file, "hub" a Hub folder in float32 made of them. own_file: runs other weights than ours
    do, made of the same ones. Modules stand beside worker.py.
    """

    name: str
    module: str
    takes: str
    group: str = "quantised"
    variant: str = ""
    own_file: bool = False
    prepares: bool = False

    @property
    def ours(self) -> bool:
        return self.name.partition("-")[0] == OURS


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime(OURS, "engine_cupaged", "file"),
        Runtime("llama_cpp", "engine_llama_cpp", "gguf", prepares=True),
        Runtime("llama_cpp-q4_0", "engine_llama_cpp", "gguf", variant="q4_0", own_file=True, prepares=True),
        Runtime("openvino", "engine_openvino", "gguf"),
        Runtime("openvino-f32", "engine_openvino", "gguf", variant="f32"),
        Runtime("ctranslate2", "engine_ctranslate2", "hub", prepares=True),
        Runtime("cupaged-f32", "engine_cupaged", "file", "float32", "f32"),
        Runtime("transformers", "engine_transformers", "hub", "float32"),
        Runtime("llama_cpp-f32", "engine_llama_cpp", "gguf", "float32", "f32", prepares=True),
        Runtime("ctranslate2-f32", "engine_ctranslate2", "hub", "float32", "f32", prepares=True),
    )
}
PEERS = tuple(name for name, runtime in RUNTIMES.items() if not runtime.ours)


def chosen(names: str) -> list[Runtime]:
    """The runtimes of a comma-separated list, with ours for each group that has one of them.

    OptionError for a name that there is none of, or that is given twice.
    """
    listed = [name.strip() for name in names.split(",")]
    for name in listed:
        if name not in RUNTIMES or RUNTIMES[name].ours:
            raise OptionError(f"--peers: {name!r} is not one of {', '.join(PEERS)}")
        if listed.count(name) > 1:
            raise OptionError(f"--peers: {name} is given twice")
    groups = {RUNTIMES[name].group for name in listed}
    return [
        runtime for runtime in RUNTIMES.values() if runtime.name in listed or (runtime.ours and runtime.group in groups)
    ]


class Files:
    """What each runtime is given to load, made in `folder` on first use.

    prepare(runtime, weights, folder) runs the runtime's own `prepare` in its own interpreter and returns a path.
    """

    def __init__(self, weights: Path, folder: Path, prepare: Callable[[Runtime, Path, Path], str]) -> None:
        self._weights = weights
        self._folder = folder
        self._prepare = prepare

    def of(self, runtime: Runtime) -> str:
        """ModelFileError where it cannot be made."""
        path = self._weights
        if runtime.takes == "gguf" and path.is_dir():
            raise ModelFileError(f"{runtime.name} takes a .gguf file, and {path} is a folder")
        if runtime.takes == "hub":
            path = self._hub()
        return self._prepare(runtime, path, self._folder) if runtime.prepares else str(path)

    def _hub(self) -> Path:
        from cupaged.model.convert import convert

        if self._weights.is_dir():
            return self._weights
        target = self._folder / f"{self._weights.stem}-float32"
        if not target.exists():
            convert(self._weights, target, "float32")
        return target
