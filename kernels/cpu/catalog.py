"""All kernels by name, group and home. Only compile.py builds them: to import a home compiles what it holds.

A group is what is compiled, kept and loaded together: a model needs the basic ones, those of its K/V cache's type and
those of its weights' types, and waits for no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from cupaged.kernels.cpu.exact_layout import EXACT_LAYOUT_OF, EXACT_LAYOUTS, OWN_PACKERS
from cupaged.kernels.cpu.quant_layout import LAYOUT_OF, LAYOUTS
from cupaged.kernels.interface import STORAGE_BYTES

# Kernels that exist once, by the module of this package they are in.
ONCE = {
    "elementwise": (
        "rms_norm",
        "head_norm",
        "rope",
        "gated_activation",
        "take_rows",
        "add",
        "copy_blocks",
    ),
    "attention": ("attention_merge",),
    "quant_rows": ("quantise_rows",),
    "sampling": ("sample", "finite"),
    "team": ("team_worker", "team_submit", "run_alone"),
}
# Kernels that are built for each of several kinds: group -> (kinds, home -> names). A kernel is called name_kind.
PER_KIND: dict[str, tuple[Sequence[str], dict[str, Sequence[str]]]] = {
    "weights": (tuple(STORAGE_BYTES), {"gemm": ("matmul", "pack", "embed")}),
    "cache": (tuple(STORAGE_BYTES), {"elementwise": ("write_kv",), "attention": ("attention_parts",)}),
    "quantised": (tuple(dict.fromkeys(LAYOUT_OF.values())), {"quant_matmul": ("quant_matmul", "quant_matmul_precise")}),
    "exact": (EXACT_LAYOUTS, {"exact_matmul": ("exact_matmul",)}),
    "records": (tuple(LAYOUTS), {"quant_embed": ("quant_embed",)}),
    "exact_blocks": (OWN_PACKERS, {"quant_pack": ("quant_pack_exact",)}),
    "blocks": (tuple(LAYOUT_OF), {"quant_pack": ("quant_pack",)}),
}
BASIC = "basic"


def _members() -> dict[str, list[tuple[str, str, str, str | None]]]:
    groups: dict[str, list[tuple[str, str, str, str | None]]] = {
        BASIC: [(name, home, name, None) for home, names in ONCE.items() for name in names]
    }
    for group, (kinds, homes) in PER_KIND.items():
        for kind in kinds:
            groups[f"{group}-{kind}"] = [
                (f"{name}_{kind}", home, name, kind) for home, names in homes.items() for name in names
            ]
    return groups


MEMBERS = _members()
GROUP_OF: dict[str, str] = {member[0]: group for group, members in MEMBERS.items() for member in members}


def groups_for(weights: Iterable[str], cache: str, exact: bool = False) -> list[str]:
    """The groups that a model waits for: `weights` are storage types and formats that are kept, `cache` the K/V's;
    exact: products with the formats are those of their float32 values."""
    groups = [BASIC, f"cache-{cache}"]
    for kind in weights:
        if kind in STORAGE_BYTES:
            groups.append(f"weights-{kind}")
        else:
            layout = (EXACT_LAYOUT_OF if exact else LAYOUT_OF)[kind]
            packers = "exact_blocks" if exact and kind in OWN_PACKERS else "blocks"
            groups += [f"{'exact' if exact else 'quantised'}-{layout}", f"records-{layout}", f"{packers}-{kind}"]
    return list(dict.fromkeys(groups))


def kernels(groups: Sequence[str], progress: Callable[[int, int], None] | None = None) -> list[tuple[str, Any]]:
    """(name, dispatcher) of every kernel of some groups; each has one explicit signature of int64 arguments.

    `progress(done, total)` is called before each is built.
    """
    wanted = [member for group in groups for member in MEMBERS[group]]
    table = []
    for done, (full, home, name, kind) in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted))
        found = getattr(import_module(f"cupaged.kernels.cpu.{home}"), name)
        table.append((full, found if kind is None else found(kind)))
    if progress is not None:
        progress(len(wanted), len(wanted))
    return table
