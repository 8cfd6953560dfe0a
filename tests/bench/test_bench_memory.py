"""`cupaged bench memory`: the traces, the buddy allocator, the simulation and its claims."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from cupaged.bench.memory import report
from cupaged.bench.memory.allocators import Allocator, Contiguous, Group, Paged
from cupaged.bench.memory.buddy import Buddy
from cupaged.bench.memory.shapes import SHAPES, find_shape
from cupaged.bench.memory.simulate import simulate
from cupaged.bench.memory.traces import DISTRIBUTIONS, Lengths, draw, read_csv
from cupaged.cli.bench_memory import memory
from cupaged.errors import ModelFileError, OptionError

SLOTS_13B = (24 << 30) // 819_200


def test_traces_have_the_means_of_the_source_and_repeat() -> None:
    for name in DISTRIBUTIONS:
        trace = draw(DISTRIBUTIONS[name], 20_000, 2048, seed=1)
        assert statistics.mean(r.prompt for r in trace) == pytest.approx(DISTRIBUTIONS[name].mean_prompt, rel=0.03)
        assert statistics.mean(r.output for r in trace) == pytest.approx(DISTRIBUTIONS[name].mean_output, rel=0.03)
        assert all(r.total <= 2048 and r.prompt >= 4 and r.output >= 4 for r in trace)
        assert trace == draw(DISTRIBUTIONS[name], 20_000, 2048, seed=1)
        assert trace != draw(DISTRIBUTIONS[name], 20_000, 2048, seed=2)


def test_buddy_pieces_never_overlap_and_merge_back() -> None:
    rng = random.Random(0)
    size = 1000  # 512 + 256 + 128 + 64 + 32 + 8
    buddy = Buddy(size)
    taken: dict[int, int] = {}
    refused = 0
    for _ in range(5000):
        if taken and rng.random() < 0.5:
            address = rng.choice(list(taken))
            buddy.free(address)
            del taken[address]
        else:
            wanted = rng.randint(1, 200)
            got = buddy.allocate(wanted)
            if got is None:
                refused += 1
                continue
            taken[got] = Buddy.rounded(wanted)
        pieces = sorted(taken.items())
        assert all(a + n <= b for (a, n), (b, _) in pairwise(pieces))
        assert all(address % n == 0 and address + n <= size for address, n in pieces)
        assert buddy.free_units == size - sum(taken.values())
    assert refused > 100
    for address in taken:
        buddy.free(address)
    assert [buddy.allocate(n) for n in (512, 256, 128, 64, 32, 8)] == [0, 512, 768, 896, 960, 992]
    assert buddy.allocate(1) is None
    with pytest.raises(OptionError, match="unit 3"):
        buddy.free(3)


def test_buddy_refuses_what_fits_only_in_pieces() -> None:
    """External fragmentation: half is free, and nothing of that size can be had."""
    buddy = Buddy(16)
    addresses = [buddy.allocate(4) for _ in range(4)]
    for address in (addresses[0], addresses[2]):
        assert address is not None
        buddy.free(address)
    assert buddy.free_units == 8 and buddy.allocate(8) is None


ALLOCATORS: list[Callable[[], Allocator]] = [
    lambda: Contiguous(4096, "max", 256),
    lambda: Contiguous(4096, "pow2", 256),
    lambda: Contiguous(4096, "oracle", 256),
    lambda: Paged(4096, 16),
    lambda: Paged(4096, 1),
]


@pytest.mark.parametrize("make", ALLOCATORS)
@pytest.mark.parametrize(("width", "churn"), [(1, None), (3, None), (3, 0.5)])
def test_every_slot_is_accounted_for_at_every_step(
    make: Callable[[], Allocator], width: int, churn: float | None
) -> None:
    allocator = make()
    trace = draw(DISTRIBUTIONS["alpaca-like"], 400, 256, seed=3)
    held = allocator.holding
    seen = 0

    def checked(running: list[Group]) -> object:
        nonlocal seen
        seen += 1
        h = held(running)
        assert h.stored + h.reserved + h.internal + h.external == allocator.slots
        assert min(h.stored, h.reserved, h.internal, h.external) >= 0
        assert h.logical == sum(g.width * g.tokens for g in running) >= h.stored
        return h

    allocator.holding = checked  # type: ignore[method-assign, assignment]
    outcome = simulate(allocator, trace, width, churn)
    assert seen == outcome.steady_steps >= 20
    assert outcome.used + outcome.waste == pytest.approx(1)
    assert held([]).external == allocator.slots  # all is given back


def test_issue_figures_at_13b() -> None:
    """24 GiB at 819,200 bytes a token: the bars of the paper's comparison."""
    assert SHAPES["llama-13b"].token_bytes(2) == SHAPES["opt-13b"].token_bytes(2) == 819_200
    assert SLOTS_13B // 2048 == 15
    trace = draw(DISTRIBUTIONS["sharegpt-like"], 700, 2048, seed=0)
    contiguous = simulate(Contiguous(SLOTS_13B, "max", 2048), trace)
    paged = simulate(Paged(SLOTS_13B, 16), trace)
    assert contiguous.most_sequences == 15
    assert 0.60 <= contiguous.waste <= 0.80
    assert paged.waste < 0.04
    assert paged.sequences >= 4 * contiguous.sequences


def test_shorter_blocks_waste_less_and_oracles_hold_more() -> None:
    trace = draw(DISTRIBUTIONS["sharegpt-like"], 150, 1024, seed=5)
    wastes = [simulate(Paged(8192, size), trace).waste for size in (1, 16, 128)]
    assert wastes == sorted(wastes)
    held = [simulate(Contiguous(8192, policy, 1024), trace).sequences for policy in ("max", "pow2", "oracle")]
    assert held == sorted(held)


def test_samples_share_their_prompt_and_beams_more() -> None:
    trace = draw(DISTRIBUTIONS["sharegpt-like"], 120, 1024, seed=6)
    alone = simulate(Paged(16384, 16), trace)
    samples = simulate(Paged(16384, 16), trace, width=4)
    beams = simulate(Paged(16384, 16), trace, width=4, churn=0.3)
    assert alone.sharing_saved == 0 < samples.sharing_saved < beams.sharing_saved
    assert samples.copied_slots > 0
    copied = simulate(Contiguous(16384, "oracle", 1024), trace, width=4, churn=0.3).copied_slots
    assert copied > 5 * beams.copied_slots  # whole sequences against single blocks


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time, output,prompt\n0,20,10\n\n1,5,7\n")
    assert read_csv(path, 64) == [Lengths(10, 20), Lengths(7, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the first line must name the columns prompt and output"),
        ("prompt,prompt,output\n", "the first line must name"),
        ("prompt,output\n", "no request in it"),
        ("prompt,output\n3,x\n", "line 2: output is 'x'; a whole number"),
        ("prompt,output\n3\n", "line 2: output is ''"),
        ("prompt,output\n3,4\n0,4\n", "line 3: prompt is '0'"),
        ("prompt,output\n3,-4\n", "line 2: output is '-4'"),
        ("prompt,output\n3,99999999999999999999\n", "line 2: output is"),
        ("prompt,output\n60,40\n", "line 2: 100 tokens in all, at most 64 fit"),
        ("prompt,output\n\u0663,4\n", "line 2: prompt is"),
    ],
)
def test_csv_that_is_no_trace(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=message):
        read_csv(path, 64)
    with pytest.raises(OptionError, match="cannot read"):
        read_csv(tmp_path / "none.csv", 64)


def test_shape_of_a_config(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_shape(str(tmp_path)).token_bytes(2) == 2 * 30 * 3 * 64 * 2
    assert find_shape(str(tmp_path / "config.json")) == find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 0}))
    with pytest.raises(ModelFileError, match="num_hidden_layers is 0"):
        find_shape(str(tmp_path))
    with pytest.raises(OptionError, match=r"neither a config\.json nor one of opt-13b"):
        find_shape("llama-14b")


def invoke(*options: str) -> tuple[object, str, BaseException | None]:
    result = CliRunner().invoke(memory, list(options), standalone_mode=False)
    return result.return_value, result.stdout, result.exception


def test_command_prints_figures_with_formula_and_claim() -> None:
    code, text, _ = invoke("--requests", "300")
    assert code == 0
    assert "2 (K, V) x 40 layers x 40 KV heads x 128 x 2 bytes = 819,200 bytes a token" in text
    assert "sequences of 2,048 tokens that fit contiguously: 15" in text
    assert "Kwon et al. 2023: 30.42 / 7.00 = 4.3 times (figure 13a)" in text


def test_json_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    code, text, _ = invoke(
        "--trace", "alpaca-like", "--budget", "2GiB", "--requests", "300", "--beams", "3", "--json", "--picture",
        str(picture), "--block-size", "8", "--block-size", "32", "--max-len", "512",
    )  # fmt: skip
    assert code == 0
    data = json.loads(text)
    assert [a["name"] for a in data["allocators"]][-2:] == ["paged, block 8", "paged, block 32"]
    assert data["settings"]["beams"] == 3 and data["settings"]["beam_churn"] == 0.03
    assert any("37.6-55.2" in f["claim"] for f in data["findings"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "2", "--beams", "2"], "exclude each other"),
        (["--budget", "25%"], "give a size"),
        (["--budget", "lots"], "lots"),
        (["--budget", "1MiB"], "must fit"),
        (["--trace", "none"], "cannot read 'none'"),
        (["--model", "gpt-5"], "neither a config.json"),
        (["--requests", "20"], "too few"),
    ],
)
def test_options_that_cannot_be_simulated(options: list[str], message: str) -> None:
    _, _, error = invoke(*options)
    assert isinstance(error, OptionError) and message.lower() in str(error).lower()


def test_findings_claim_nothing_for_other_cases() -> None:
    outcome = [simulate(a, [Lengths(8, 8)] * 60) for a in (Contiguous(64, "max", 32), Paged(64, 16))]
    rows = report.findings(outcome, SHAPES["llama-7b"], 2, 64 * 524_288, 32, "my.csv", 1, False)
    assert all(row["claim"] == "" for row in rows) and all(row["formula"] for row in rows)
