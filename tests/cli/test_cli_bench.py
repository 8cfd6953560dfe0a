"""`cupaged bench generate|matmul|attention|kernels`: options, and rows with figures that fit each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import DATA

from cupaged.bench import cases, roofs
from cupaged.bench.cases import AttentionShape, RandomWeights, attention_case, block_columns, matmul_case
from cupaged.bench.pace import quantile
from cupaged.cli import main
from cupaged.cli.bench_kernels import WEIGHT_TYPES
from cupaged.device.cpu import CpuDevice
from cupaged.errors import DeviceError

Call = Callable[..., tuple[int, str, str]]
TINY = ["--weights", str(DATA / "llama"), "--threads", "1", "--rounds", "1"]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are not looked at here, so nothing has to be far from the caches."""
    monkeypatch.setattr(cases, "FAR", 1 << 16)
    monkeypatch.setattr(roofs.Roofs.__init__, "__defaults__", (1 << 25,))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line on the real runtime: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        code = main(["bench", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def rows(call: Call, *args: str) -> list[dict[str, Any]]:
    code, out, err = call(*args, "--threads", "1", "--seconds", "0.05", "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_matmul_rows_count_bytes_and_operations(call: Call) -> None:
    found = rows(
        call, "matmul", "--shape", "64x96", "--rows", "1", "--rows", "3", "--dtype", "Q8_0", "--dtype", "float16"
    )
    assert [row["case"] for row in found] == [
        "Q8_0 64x96, 1 row", "Q8_0 64x96, 3 rows", "float16 64x96, 1 row", "float16 64x96, 3 rows"
    ]  # fmt: skip
    for row, nbytes in zip(found, (64 * 102, 64 * 102, 64 * 192, 64 * 192), strict=True):
        count = 3 if "3 rows" in row["case"] else 1
        assert row["gb_s"] == pytest.approx(nbytes / row["microseconds"] / 1e3)
        assert row["gop_s"] == pytest.approx(2 * count * 64 * 96 / row["microseconds"] / 1e3)
        assert row["read_roof"] > 0.1 and row["arithmetic_roof"] > 1
        assert row["arithmetic"] == ("byte dot products" if "Q8_0" in row["case"] else "float multiply-adds")
        shares = {"memory": row["gb_s"] / row["read_roof"], "arithmetic": row["gop_s"] / row["arithmetic_roof"]}
        assert row["share"] == pytest.approx(max(shares.values())) == pytest.approx(shares[row["bound"]])


def test_attention_rows_count_shared_blocks_once(call: Call) -> None:
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--context", "96", "--sequences", "3"]
    apart, shared = rows(call, "attention", *shape)[0], rows(call, "attention", *shape, "--shared", "64")[0]
    assert apart["case"] == "float16 4/2 heads of 16, context 96, 3 x 1 query"
    assert shared["case"] == "float16 4/2 heads of 16, context 96 (64 shared), 3 x 1 query"
    token = 2 * 2 * 16 * 2
    assert apart["gb_s"] == pytest.approx(3 * 96 * token / apart["microseconds"] / 1e3)
    assert shared["gb_s"] == pytest.approx((64 + 3 * 32) * token / shared["microseconds"] / 1e3)
    for row in (apart, shared):
        assert row["gop_s"] == pytest.approx(3 * 96 * 4 * 16 * 4 / row["microseconds"] / 1e3)


def test_attention_operations_of_a_chunk_leave_out_the_masked_half(call: Call) -> None:
    (row,) = rows(
        call, "attention", "--heads", "2", "--kv-heads", "2", "--head-dim", "16", "--context", "32", "--queries", "32"
    )
    assert row["gop_s"] == pytest.approx(4 * (32 * 33 / 2) * 2 * 16 / row["microseconds"] / 1e3)


def test_rows_as_text_stand_in_columns(call: Call) -> None:
    code, out, _ = call("matmul", "--shape", "32x32", "--rows", "1", "--seconds", "0.05", "--threads", "1")
    head, row = out.splitlines()
    assert code == 0 and head.startswith("kernel ") and row.startswith("matmul    Q4_1 32x32, 1 row ")
    assert row.endswith(("% of memory", "% of arithmetic"))


def test_kernels_that_are_compiled_meanwhile_are_announced(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(threads: int, progress: Callable[[int, int], None]) -> CpuDevice:
        progress(0, 3)
        time.sleep(0.1)
        progress(3, 3)
        raise DeviceError("enough")

    monkeypatch.setattr("cupaged.cli.progress.Progress.__init__.__defaults__", (0.02,))
    monkeypatch.setattr("cupaged.device.cpu.CpuDevice", compiles)
    monkeypatch.setattr("cupaged.bench.kernels.CpuDevice", compiles)
    for command in ("matmul", "attention", "kernels"):
        code, _, err = call(command, "--threads", "1")
        assert code == 1 and err.startswith("cupaged: compiling kernels, once for"), command


def test_generate_tells_rates_and_roofs(call: Call) -> None:
    code, out, err = call("generate", *TINY, "--prompt-tokens", "8", "--new-tokens", "4", "--streams", "2", "--json")
    assert code == 0, err
    row = json.loads(out)
    assert (row["streams"], row["prompt_tokens"], row["new_tokens"]) == (2, 8, 4)
    assert row["prefill_tokens_s"] > 0 and row["decode_tokens_s"] > 0 and row["machine"]["cores"] >= 1
    assert row["rounds"] == {"prefill_tokens_s": [row["prefill_tokens_s"]], "decode_tokens_s": [row["decode_tokens_s"]]}
    assert row["decode_gb_s"] > row["decode_tokens_s"] / 2 * row["weights"]["bytes"] / 1e9 * 0.3
    assert row["read_roof_gb_s"] > 0.1 and row["arithmetic_roof_gop_s"] > 1

    code, out, err = call("generate", *TINY, "--prompt-tokens", "8", "--new-tokens", "4")
    assert code == 0, err
    first, prefill, decode = out.splitlines()
    assert first.endswith("1 stream of 8 + 4 tokens, medians of 1")
    assert prefill.startswith("prefill ") and "GOP/s (" in prefill
    assert decode.startswith("decode ") and "of the read bandwidth)" in decode
    assert err.splitlines() == ["cupaged: a round to warm up ...", "cupaged: round 1 of 1 ..."]


def test_pace_tells_gaps_and_speeds_over_what_they_are_without_each_other(call: Call) -> None:
    code, out, err = call("pace", *TINY, "--decodes", "2", "--prompt-tokens", "40", "--json")
    assert code == 0, err
    row = json.loads(out)
    assert (row["decodes"], row["prompt_tokens"]) == (2, 40)
    for name, gap in row["gap_s"].items():
        assert row["gap_ratio"][name] == gap["beside"] / gap["without"] > 0
    assert row["gap_s"]["p50"]["without"] <= row["gap_s"]["p99"]["without"]
    speeds = row["prompt_tokens_s"]
    assert row["speed_ratio"] == speeds["beside"] / speeds["alone"] > 0

    code, out, err = call("pace", *TINY, "--decodes", "2", "--prompt-tokens", "40")
    assert code == 0, err
    first, half, most, speed = out.splitlines()
    assert first.endswith(", 1 thread; 2 decoding, 1 round")
    assert err.splitlines() == ["cupaged: a round to warm up ...", "cupaged: round 1 of 1 ..."]
    assert half.startswith("gap p50 ") and most.startswith("gap p99 ") and most.endswith(" times")
    assert speed.startswith("prompt ") and speed.endswith("%   (40 tokens)")


def test_pace_counts_gaps_as_what_a_share_of_them_does_not_exceed() -> None:
    values = [float(n) for n in range(200, 0, -1)]
    assert [quantile(values, share) for share in (0.005, 0.5, 0.99, 1.0)] == [1, 100, 198, 200]
    assert quantile([3.0], 0.99) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["pace", *TINY, "--prompt-tokens", "300"], "--prompt-tokens 300: the model has 256 positions"),
        (["pace", *TINY, "--prompt-tokens", "40", "--kv-memory", "64KiB"], "--prompt-tokens 40: takes up to 74 steps"),
        (["pace", *TINY, "--prompt-tokens", "40", "--max-sequences", "4", "--decodes", "4"],
         "--decodes 4: one more sequence is needed, and 4 can run"),
        (["pace", *TINY, "--prompt-tokens", "40", "--decodes", "20", "--kv-memory", "256KiB"],
         "need room for 2040"),
        (["matmul", "--shape", "64"], "'64' is not OUTxIN"),
        (["matmul", "--shape", "0x64"], "'0x64' is not OUTxIN"),
        (["matmul", "--shape", "131072x131072"], "is not OUTxIN"),
        (["matmul", "--shape", "64x48"], "--shape 64x48: Q4_1 needs inputs in blocks of 32"),
        (["matmul", "--shape", "64x288", "--dtype", "Q6_K"], "Q6_K needs inputs in blocks of 256"),
        (["matmul", "--dtype", "int3"], "'int3' is not one of 'float32', 'float16', 'bfloat16', 'Q4_0'"),
        (["matmul", "--rows", "0"], "0 is not a whole number in 1 .. 65536"),
        (["matmul", "--row", "1"], "no such option: --row; did you mean --rows?"),
        (["attention", "--heads", "8"], "--heads 8 is not a multiple of --kv-heads 3"),
        (["attention", "--shared", "10"], "--shared 10 is not a multiple of --block-size 16"),
        (["attention", "--shared", "256"], "--context 256 does not hold --shared 256 and --queries 1"),
        (["attention", "--context", "1000000", "--sequences", "9"], "is more than 1048576 tokens"),
        (["attention", "--dtype", "Q4_1"], "'Q4_1' is not one of"),
        (["generate", *TINY, "--new-tokens", "1"], "1 is not a whole number in 2 .. 1048576"),
        (["generate", *TINY, "--prompt-tokens", "999999"], "--prompt-tokens 999999 and --new-tokens 128 are more than"),
        (["generate", *TINY, "--prompt-tokens", "8", "--new-tokens", "8", "--streams", "64", "--kv-memory", "64KiB"],
         "--streams 64 of 16 tokens need room for 1024 in K/V memory"),
        (["kernels", "--only", "nothing"], "'nothing' is not one of 'matmul', 'attention'"),
        (["generate"], "Missing option '--weights'"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used(args: list[str], message: str, call: Call) -> None:
    code, out, err = call(*args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and message in err


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_every_kept_type_can_be_measured(dtype: str) -> None:
    device = CpuDevice(1)
    try:
        case = matmul_case(device, dtype, 32, block_columns(dtype), 2)
        case.run()
        assert case.calls >= 1 and case.nbytes > 0
        assert case.integer is (dtype not in ("float32", "float16", "bfloat16"))
    finally:
        device.close()


def test_random_blocks_hold_finite_numbers_only() -> None:
    from cupaged.model.quants import dequantise

    for dtype in WEIGHT_TYPES[3:]:
        source = RandomWeights((4, block_columns(dtype)), dtype)
        assert abs(dequantise(dtype, source.blocks(0, 4))).max() < 1e6


def test_attention_goes_round_enough_memory() -> None:
    device = CpuDevice(1)
    try:
        case = attention_case(device, "float32", AttentionShape(2, 1, 16, 64, 1, 2))
        for _ in range(3):
            case.run()
        assert case.nbytes == 2 * 64 * 2 * 16 * 4
    finally:
        device.close()
