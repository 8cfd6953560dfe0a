"""What a step does, as data: the scheduler puts it together, the engine carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from cupaged.memory import PlanItem
from cupaged.request import Request, Sequence

PROMPT_ROWS = 64  # tokens of prompts whose log-probabilities are wanted, in one step: their logits are V floats each


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence from position `start`. `samples`: the last of them is its last known token, so that
    its logits choose the next one. `rows`: of so many of the last tokens the logits are wanted."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    rows: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does: first the plan items (copies), then one forward pass over all chunks.

    `outgrown`: requests of beams that have no room left to go on, and end.
    """

    chunks: tuple[Chunk, ...] = ()
    items: tuple[PlanItem, ...] = ()
    outgrown: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class Draft:
    """A step being put together; a victim's chunks are taken out again. `reserved`: per KV group, blocks that are kept
    for sequences whose room is still being made."""

    budget: int
    reserved: list[int]
    prompt_rows: int = PROMPT_ROWS
    chunks: list[Chunk] = field(default_factory=list)
    items: list[PlanItem] = field(default_factory=list)
    outgrown: list[Request] = field(default_factory=list)
    preempted: bool = False
