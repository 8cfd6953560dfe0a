"""From options to KV blocks: sizes as people write them, what fits, and what is refused with its numbers."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import DATA
from engine_support import tiny

from cupaged import LLM
from cupaged.device.cpu import CpuDevice
from cupaged.errors import CapacityError, DeviceError, OptionError
from cupaged.loading import LoadOptions
from cupaged.memory import MAX_FRAMES
from cupaged.memory_plan import MemoryPlan, parse_bytes, plan_memory
from cupaged.model.config import KVGroup, ModelConfig, RopeConfig

GIB = 1 << 30
CONFIG = ModelConfig(
    family="llama", vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14336, max_position=8192, norm_eps=1e-5,
    kv_groups=(KVGroup(tuple(range(32)), None, RopeConfig(1e4, 128)),),
)  # fmt: skip
BLOCK = 2 * 32 * 16 * 8 * 128 * 2  # bytes: K and V, layers, tokens, KV heads, head_dim, float16


def plan(
    kv_memory: Any = None, max_model_len: Any = None, available: int = 64 * GIB, dtype: Any = "float16", size: int = 16,
    **swap: Any,
) -> MemoryPlan:  # fmt: skip
    return plan_memory(CONFIG, dtype, size, kv_memory, max_model_len, available, 15 * GIB, **swap)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (12345, 12345),
        ("12345", 12345),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        (" 1.5GB ", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("3KB", 3000),
        ("3kib", 3072),
        ("7B", 7),
        ("25%", 250),
        ("12.5 %", 125),
        ("100%", 1000),
    ],
)
def test_sizes_are_read_as_people_write_them(value: Any, size: int) -> None:
    assert parse_bytes("kv_memory", value, 1000) == size


WRONG_SIZES = [
    *(0, -1, 1.5, True, None, [], 2**63, 10**400),
    *("", "x", "-5", "0", "0.4", "1e9", "5XB", "5 M", "MiB", "%", "0%", "101%", "nan", "inf", "1,000", "9" * 400),
]


@pytest.mark.parametrize("value", WRONG_SIZES, ids=lambda value: repr(value)[:12])
def test_other_sizes_are_refused_by_name(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^kv_memory: ") as caught:
        parse_bytes("kv_memory", value, 1000)
    assert len(str(caught.value)) < 200


def test_by_default_four_contexts_at_most_a_quarter_of_what_is_available() -> None:
    roomy = plan()
    assert (roomy.num_blocks, roomy.block_bytes, roomy.max_model_len) == (4 * 512, BLOCK, 8192)
    assert (roomy.bytes_per_token, roomy.num_tokens, roomy.nbytes) == (BLOCK // 16, 4 * 8192, 4 * 512 * BLOCK)
    tight = plan(available=GIB)
    assert tight.num_blocks == GIB // 4 // BLOCK == 128
    assert tight.max_model_len == 128 * 16  # fewer positions than the model has, and said so by the plan
    short = plan(max_model_len=1000)
    assert (short.num_blocks, short.max_model_len) == (4 * 63, 1000)


def test_kv_memory_is_cut_to_whole_blocks() -> None:
    assert plan(kv_memory=5 * BLOCK + BLOCK - 1).num_blocks == 5
    assert plan(kv_memory="50%", available=20 * BLOCK).num_blocks == 10
    assert plan(kv_memory="100%", available=20 * BLOCK).num_blocks == 20
    assert plan(kv_memory=BLOCK, dtype="float32", size=8).num_blocks == 1


def test_a_pool_never_has_more_blocks_than_a_reference_can_name() -> None:
    assert plan(kv_memory=(MAX_FRAMES + 10) * BLOCK, available=1 << 60).num_blocks == MAX_FRAMES


def test_swap_memory_is_a_second_pool_and_makes_room_for_longer_sequences() -> None:
    both = plan(kv_memory=5 * BLOCK, swap_memory=7 * BLOCK + 1)
    assert (both.num_blocks, both.host_blocks, both.max_model_len) == (5, 7, 12 * 16)
    assert (both.nbytes, both.host_bytes, both.num_tokens) == (5 * BLOCK, 7 * BLOCK, 5 * 16)
    assert plan(kv_memory=5 * BLOCK).host_blocks == 0  # none unless asked for
    assert plan(kv_memory=5 * BLOCK, swap_memory=7 * BLOCK, max_model_len=12 * 16).max_model_len == 12 * 16
    with pytest.raises(CapacityError, match=r"193 positions need 13 KV blocks .* bytes hold 5, the host pool 7"):
        plan(kv_memory=5 * BLOCK, swap_memory=7 * BLOCK, max_model_len=12 * 16 + 1)


def test_swap_memory_comes_from_what_the_blocks_leave_where_memory_is_one() -> None:
    assert plan(kv_memory=5 * BLOCK, swap_memory="50%", available=25 * BLOCK).host_blocks == 10
    apart = plan(kv_memory=5 * BLOCK, swap_memory="50%", available=25 * BLOCK, host_available=100 * BLOCK)
    assert apart.host_blocks == 50


@pytest.mark.parametrize("swap_memory", [BLOCK - 1, "1KiB", 6 * BLOCK, "0%"])
def test_swap_memory_that_cannot_be_had_is_refused_with_its_numbers(swap_memory: Any) -> None:
    with pytest.raises(OptionError, match=r"^swap_memory: ") as caught:
        plan(kv_memory=5 * BLOCK, swap_memory=swap_memory, available=10 * BLOCK)
    assert swap_memory == "0%" or f"one KV block takes {BLOCK:,}, {5 * BLOCK:,} are available" in str(caught.value)


@pytest.mark.parametrize("available", [0, -5 * GIB, BLOCK - 1])
@pytest.mark.parametrize("kv_memory", [None, "25%", "64MiB", 12])
def test_R05_no_room_names_free_weights_and_block_bytes(available: int, kv_memory: Any) -> None:
    with pytest.raises(OptionError) as caught:
        plan(kv_memory, available=available)
    message = str(caught.value)
    for part in (f"{BLOCK:,} bytes", "= 2*32*16*8*128*2", f"{max(0, available):,} are available", f"{15 * GIB:,}"):
        assert part in message
    assert BLOCK == 2 << 20


@pytest.mark.parametrize("kv_memory", [BLOCK - 1, "1KiB", 10 * BLOCK + 1])
def test_R05_too_little_and_too_much_are_refused_with_both_numbers(kv_memory: Any) -> None:
    with pytest.raises(OptionError, match=f"kv_memory: .*one KV block takes {BLOCK:,} bytes") as caught:
        plan(kv_memory, available=10 * BLOCK)
    assert f"{10 * BLOCK:,} are available" in str(caught.value)


def test_R05_a_length_that_does_not_fit_is_refused_only_if_asked_for() -> None:
    with pytest.raises(CapacityError, match=r"max_model_len: 100 positions need 7 KV blocks .* bytes hold 6"):
        plan(kv_memory=6 * BLOCK, max_model_len=100)
    assert plan(kv_memory=7 * BLOCK, max_model_len=100).max_model_len == 100
    assert plan(kv_memory=6 * BLOCK).max_model_len == 96


@pytest.mark.parametrize("length", [0, -1, 8193, 1.5, True, "9"])
def test_lengths_beyond_the_model_are_refused(length: Any) -> None:
    with pytest.raises(OptionError, match=r"max_model_len: .* is not in 1\.\.8192"):
        plan(max_model_len=length)


def test_R05_on_a_full_machine_loading_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.device.cpu.host_memory", lambda: (GIB, 1000))
    with pytest.raises(OptionError, match=r"no room for K/V.*0 are available"):
        tiny()


WRONG_OPTIONS: list[tuple[str, Any]] = [
    *(("device", value) for value in ("gpu", "", None, 0, "CPU")),
    *((name, value) for name in ("dtype", "kv_dtype") for value in ("float64", "fp16", "", None, 16, "int8")),
    *(("block_size", value) for value in (0, -1, 257, 1.0, True, "16", None)),
    *(("max_model_len", value) for value in (0, -1, 2**31, 1.0, False, "64")),
    *(("threads", value) for value in (0, -1, 257, 2.0, True, "2")),
    *(("max_batch_tokens", value) for value in (0, -1, 2**16 + 1, 1.0, "5")),
    *(("max_sequences", value) for value in (0, -1, 4097, 1.0, "5")),
    *(("kv_memory", value) for value in (0, -1, "lots", 1.5, True, "101%")),
    *(("swap_memory", value) for value in (0, -1, "lots", 1.5, True, "101%")),
    ("threads", 10**5000),
]


@pytest.mark.parametrize(
    ("name", "value"), WRONG_OPTIONS, ids=lambda value: repr(value)[:12] if value != 10**5000 else ""
)
def test_every_option_refuses_what_it_cannot_take(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{name}: ") as caught:
        LLM(DATA / "llama", **{name: value})
    assert "\n" not in str(caught.value)


def test_the_ends_of_each_range_are_taken() -> None:
    LoadOptions(block_size=1, max_model_len=1, threads=1, max_batch_tokens=1, max_sequences=1, kv_memory=1)
    LoadOptions("cpu", "bfloat16", "float16", 256, "100%", 2**31 - 1, 256, 1 << 16, 4096)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="kv_memroy"):
        LLM(DATA / "llama", kv_memroy="1GiB")  # type: ignore[call-arg]


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="cuda"):
        LLM(DATA / "llama", device="cuda")


def test_options_arrive_where_they_belong() -> None:
    options: dict[str, Any] = {"block_size": 8, "max_model_len": 100, "threads": 2, "max_batch_tokens": 9}
    with tiny(**options, kv_dtype="bfloat16", kv_memory="1MiB", max_sequences=5, swap_memory="2MiB") as llm:
        engine = llm.engine
        assert isinstance(engine.device, CpuDevice)
        assert engine.device.threads == 2
        assert (engine.caches[0].block_size, engine.caches[0].dtype) == (8, "bfloat16")
        assert engine.caches[0].nbytes <= 1 << 20 < engine.caches[0].nbytes + engine.caches[0].bytes_per_block
        host = engine.caches[0].host_array
        assert host is not None and host.nbytes <= 2 << 20 < host.nbytes + engine.caches[0].bytes_per_block
        assert llm.info()["kv_cache"]["host_blocks"] == engine.caches[0].host_blocks
        assert engine.max_model_len == 100
        assert (engine.scheduler.max_tokens, engine.scheduler.max_sequences) == (9, 5)
