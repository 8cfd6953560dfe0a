"""Quantised weights through the whole engine: what is kept, how near the logits are, whose tokens come, and no bit that
depends on company."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path

import gguf as public
import numpy as np
import pytest
from checkpoints import Bare
from model_files import T_F32, gguf_model, permuted, write_folder
from test_quantised_models import CHANGES, HEADS, HIDDEN, KV_HEADS, METADATA, NORMS, SHAPES, VOCABULARY, write_both

from cupaged import LLM, OptionError, SamplingParams
from cupaged.device import get_device
from cupaged.kernels.interface import PACKED_BLOCK_BYTES

KINDS = tuple(PACKED_BLOCK_BYTES)
IDS = [int(i) for i in np.random.default_rng(11).integers(0, VOCABULARY, 40)]
# Errors of logits against float32, over the logits' standard deviation. Root mean square, measured: 0.013 (IQ4_NL) to
# 0.043 (Q6_K, whose random bits make an unruly model); largest of a row, median of rows: 0.031 to 0.063.
RMS, ROW = 0.06, 0.1
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@lru_cache
def logits_of(path: Path, dtype: str) -> np.ndarray:
    return Bare(path, get_device("cpu"), dtype=dtype, num_blocks=4).logits(IDS)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_close_to_those_of_float32(tmp_path: Path, kind: str) -> None:
    file, _ = write_both(kind, tmp_path)
    exact, found = logits_of(file, "float32"), logits_of(file, "quantised")
    errors, spread = np.abs(exact - found), float(exact.std())
    rms, row = float(np.sqrt((errors**2).mean())) / spread, errors.max(axis=1)
    print(f"{kind}: error of logits over their deviation: {rms:.3f}, largest of a row {np.median(row) / spread:.3f}")
    assert 0.001 < rms < RMS  # at least: it is not float32 that ran
    assert np.median(row) < ROW * spread
    best = np.sort(exact, axis=1)
    clear = best[:, -1] - best[:, -2] > 2 * row  # no error of that size can change the best token
    assert clear.sum() >= len(IDS) * 0.6
    assert (exact.argmax(axis=1) == found.argmax(axis=1))[clear].all()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_that_float32_finds_best(tmp_path: Path, kind: str) -> None:
    """Each token is float32's best after the tokens before it, or one that float32 finds nearly as good."""
    file, _ = write_both(kind, tmp_path)
    with LLM(file, device="cpu", kv_memory="1MiB") as llm:
        about = llm.info()["weights"]
        assert (about["dtype"], list(about["kept_bytes"])) == ("quantised", [kind])
        assert about["bytes"] == sum(about["kept_bytes"].values())
        assert llm.info()["kv_cache"]["kv_dtype"] == "bfloat16"
        (found,) = llm.generate(IDS[:9], GREEDY)
        llm.engine.check_idle()
    exact, ids = Bare(file, get_device("cpu"), num_blocks=4), IDS[:9]
    same = 0
    for token in found.outputs[0].token_ids:
        row = exact.logits(ids)[-1]
        assert row.max() - row[token] < 2 * ROW * row.std()
        same += int(row.argmax() == token)
        ids = [*ids, token]
    assert same >= 9  # of 12


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_chunks_and_company_change_no_bit(tmp_path: Path, kind: str) -> None:
    file, _ = write_both(kind, tmp_path)
    bare = Bare(file, get_device("cpu"), dtype="quantised", num_blocks=4)
    whole = logits_of(file, "quantised")
    for chunk in (1, 3, 17):
        assert bare.logits(IDS, chunk, [3, 1, 0, 2]).tobytes() == whole.tobytes(), chunk
    prompts = [IDS[first : first + 5] for first in range(0, 35, 5)]
    with LLM(file, device="cpu", kv_memory="1MiB", max_batch_tokens=7, threads=2) as llm:
        together = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    with LLM(file, device="cpu", kv_memory="1MiB", threads=1) as llm:
        alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    assert together == alone


def float_folder(folder: Path, **changes: int) -> tuple[Path, dict[str, np.ndarray]]:
    """A Hub folder in float32 of the model of test_quantised_models, and its matrices by GGUF name."""
    sizes = {**CHANGES, **changes}
    rng = np.random.default_rng(2)
    weights, matrices = {}, {}
    for name, (theirs, rows, columns) in SHAPES.items():
        shape = tuple(sizes["intermediate_size"] if size == 512 else size for size in (rows, columns))
        matrices[name] = (rng.standard_normal(shape) * 0.05).astype(np.float32)
        weights[f"{theirs}.weight"] = matrices[name]
    weights |= {f"{theirs}.weight": np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32) for theirs in NORMS.values()}
    return write_folder(folder, weights, None, **{**CHANGES, "max_position_embeddings": 64, **changes}), matrices


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_narrowed_while_loading_is_what_a_converter_would_have_stored(tmp_path: Path, kind: str) -> None:
    folder, matrices = float_folder(tmp_path / "hub")
    tensors = {
        f"{ours}.weight": (T_F32, (HIDDEN,), np.linspace(0.5, 1.5, HIDDEN, dtype="<f4").tobytes()) for ours in NORMS
    }
    code = public.GGMLQuantizationType[kind]
    for name, values in matrices.items():
        raw = public.quantize(values, code)
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(name)
        tensors[f"{name}.weight"] = (code.value, values.shape, (permuted(raw, heads) if heads else raw).tobytes())
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_model(METADATA, tensors))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=5)
    results = []
    for path, quantize in ((file, None), (folder, kind.lower())):
        with LLM(path, device="cpu", kv_memory="1MiB", quantize=quantize) as llm:
            assert list(llm.info()["weights"]["kept_bytes"]) == [kind]
            results.append(llm.generate(IDS[:9], params)[0].outputs[0])
    assert results[0].token_ids == results[1].token_ids
    assert results[0].logprobs == results[1].logprobs  # the same bits


def test_a_matrix_whose_rows_are_no_whole_blocks_stays_as_it_is_and_is_named(tmp_path: Path) -> None:
    folder, _ = float_folder(tmp_path / "hub", intermediate_size=500)
    with pytest.warns(
        UserWarning, match=r"hub: not quantised but kept as stored: layers\.0\.down\.weight; rows of 500 val"
    ):
        llm = LLM(folder, device="cpu", kv_memory="1MiB", quantize="q8_0")
    with llm:
        assert set(llm.info()["weights"]["kept_bytes"]) == {"Q8_0", "float32"}
        found = llm.generate(IDS[:9], GREEDY)[0].token_ids
    with LLM(folder, device="cpu", kv_memory="1MiB") as exact:
        assert exact.info()["weights"]["dtype"] == "float32"
        assert found[0] == exact.generate(IDS[:9], GREEDY)[0].token_ids[0]


def test_impossible_narrowing_is_one_line(tmp_path: Path) -> None:
    file, folder = write_both("Q4_1", tmp_path)
    for path, options, message in (
        (file, {"quantize": "q8_0"}, r"^quantize: embed\.weight of .*model\.gguf is Q4_1, quantised already"),
        (folder, {"quantize": "q5_0"}, r"^quantize: 'q5_0' is not one of q8_0, q4_0$"),
        (folder, {"quantize": "q8_0", "dtype": "float16"}, r"^quantize: q8_0 and dtype float16 exclude each other$"),
        (folder, {"quantize": True}, r"^quantize: True is not one of"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(OptionError, match=message):
                LLM(path, device="cpu", **options)  # type: ignore[arg-type]
