"""Numba kernels -> object code that needs neither Numba nor the Python interpreter.

A kernel is a jitted function with one explicit signature of int64 arguments. Of Numba's optimised LLVM module only the
native function is kept; everything else (the Python wrapper, and with it every reference to the interpreter) becomes
internal and is dropped. It is then compiled once more as position-independent code for this processor.

Its symbol is made of its name here: Numba's own ends in a number that counts what a process has compiled, and two
kernels from two processes may have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cupaged.kernels.cpu.processor import target


def compile_kernels(
    groups: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, symbol, object code) of every kernel of some groups. `progress(done, total)`: as they come."""
    import llvmlite.binding as llvm

    from cupaged.kernels.cpu import catalog

    machine = target_machine()
    for name, function in catalog.kernels(groups, progress):
        (overload,) = function.overloads.values()
        module = llvm.parse_assembly(overload.library.get_llvm_str())
        keep = overload.fndesc.llvm_func_name
        for item in [*module.functions, *module.global_variables]:
            if not item.is_declaration:
                item.linkage = "external" if item.name == keep else "internal"
        symbol = f"cupaged_{name}"
        module.get_function(keep).name = symbol
        passes = llvm.create_new_module_pass_manager()
        passes.add_global_dead_code_eliminate_pass()
        passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
        left = [
            f.name for f in module.functions if f.is_declaration and f.name.startswith(("Py", "NRT_", "numba_", "_Py"))
        ]
        if left:  # arrays, exceptions and Python objects have no place in a kernel: a fault of the kernel's author
            raise RuntimeError(f"kernel {name} needs the interpreter: {', '.join(left)}")
        yield name, symbol, machine.emit_object(module)


def target_machine() -> Any:
    """This processor, or the lesser one that was asked for (processor.py), for position-independent code."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=target().name,
        features=target().flags,
        opt=3,
        reloc="pic",
        codemodel="small",
    )
