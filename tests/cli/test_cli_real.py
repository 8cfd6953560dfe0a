"""The command line with the real LLM, on a tiny checkpoint whose greedy tokens are known, and on random weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cupaged import LLM, SamplingParams
from cupaged.cli import main

GOLDEN = Path(__file__).resolve().parent.parent / "golden_data" / "llama"


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """Have them in the cache, so that no test meets the line that says they are being compiled."""
    LLM(GOLDEN).close()


@pytest.fixture(scope="module")
def golden() -> tuple[str, list[int]]:
    """A prompt as --token-ids takes it, and the ids that follow."""
    expected = load_file(GOLDEN / "expected.safetensors")
    return ",".join(map(str, expected["ids_1"].tolist())), expected["greedy_1"].tolist()


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a long context: enough work to be interrupted in."""
    folder = tmp_path_factory.mktemp("big")
    layers, hidden, inner, vocab = 4, 512, 1408, 1000
    config = json.loads((GOLDEN / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    for layer in range(layers):
        here = f"model.layers.{layer}"
        shapes |= {f"{here}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{here}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{here}.mlp.down_proj": (hidden, inner)}
        shapes |= {f"{here}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm"] = (hidden,)
    tensors = {name: random.standard_normal(shape, np.float32) * 0.05 for name, shape in shapes.items()}
    save_file(
        {f"{name}.weight": value.astype(np.float16) for name, value in tensors.items()}, folder / "model.safetensors"
    )
    with LLM(folder, device="cpu", kv_memory="4MiB") as llm:  # its kernels, too, in the cache
        llm.generate([1], SamplingParams(max_tokens=1))
    return folder


def start(env: dict[str, str], *args: str, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cupaged", *args]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, **(pipes | options))


def test_text_of_a_model_without_tokenizer_is_its_ids(
    golden: tuple[str, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, ids = golden
    model = ["-w", str(GOLDEN), "--dtype", "float32", "--kv-dtype", "float32", "--ignore-eos"]
    assert main(["generate", *model, "--token-ids", prompt, "-n", str(len(ids))]) == 0
    assert capsys.readouterr().out == ",".join(map(str, ids)) + "\n"


def test_json_of_several_prompts(golden: tuple[str, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    prompt, ids = golden
    model = ["-w", str(GOLDEN), "--dtype", "float32", "--kv-dtype", "float32", "--ignore-eos", "--block-size", "8"]
    prompts = ["--token-ids", prompt, "--token-ids", "5,6,7", "--token-ids", prompt]
    assert main(["generate", *model, *prompts, "-n", "6", "--json", "--logprobs", "2", "--stats"]) == 0
    captured = capsys.readouterr()
    first, _, third = (json.loads(line) for line in captured.out.splitlines())
    assert first["token_ids"] == third["token_ids"] == ids[:6]
    assert first["logprobs"] == third["logprobs"] and first["logprobs"][0][str(ids[0])] < 0
    assert first["usage"]["completion_tokens"] == 6 and first["finish_reason"] == "length"
    assert ", 18 generated in " in captured.err


def test_S06_a_prompt_that_leaves_less_than_the_default_room_gets_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompt = ",".join(["5"] * 250)  # of 256 positions
    options = ["-w", str(GOLDEN), "--token-ids", prompt, "--ignore-eos", "--json"]
    assert main(["generate", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["token_ids"]) == 6 and result["finish_reason"] == "length"
    assert main(["generate", *options, "-n", "7"]) == 2  # asked for, it is refused with both numbers
    err = capsys.readouterr().err
    assert "257" in err and "256" in err and err.count("\n") == 1


def test_info_tells_the_memory_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "-w", str(GOLDEN), "--kv-dtype", "float16", "--kv-memory", "96KiB", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["kv_cache"]
    token = 2 * 3 * 2 * 16 * 2  # k and v, layers, kv heads, head_dim, bytes
    assert memory["kv_bytes_per_token"] == token and memory["block_bytes"] == 16 * token
    assert memory["num_blocks"] == 96 * 1024 // (16 * token) and memory["kv_bytes"] == memory["num_blocks"] * 16 * token


def refusals(tmp_path: Path) -> dict[str, tuple[str, list[str]]]:
    """Weights that cannot be had -> what the one line must name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no weights")
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    return {
        "absent": (str(tmp_path / "absent"), ["absent", "no such file or folder"]),
        "file": (str(tmp_path / "notes.txt"), ["notes.txt", "GGUF"]),
        "empty": (str(tmp_path / "empty"), ["empty", "config.json"]),
        "strange": (str(strange), ["strange", "mamba"]),
    }


@pytest.mark.parametrize("kind", ["absent", "file", "empty", "strange"])
@pytest.mark.parametrize("command", ["generate", "info"])
def test_U04_what_cannot_be_loaded_is_one_line(
    command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, words = refusals(tmp_path)[kind]
    code = main([command, "-w", weights, *(["-p", "a"] if command == "generate" else [])])
    captured = capsys.readouterr()
    assert code == 1 and captured.out == ""
    assert captured.err.startswith("cupaged: error: ") and captured.err.count("\n") == 1
    assert [word for word in words if word.lower() not in captured.err.lower()] == []


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a GPU here")
def test_U04_a_gpu_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-w", str(GOLDEN), "--token-ids", "1", "--device", "gpu"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("cupaged: error: device 'cuda'") and err.count("\n") == 1


def test_S05_T09_a_prompt_that_cannot_be_served_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for ids in ("", "320", "-1", "5279552648203111001"):
        assert main(["generate", "-w", str(GOLDEN), "--token-ids", "1", "--token-ids", ids]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("cupaged: error: prompt 2 of 2 (--token-ids): ")
        assert ids in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("delay", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("length", [1, 30_000])
def test_U02_interrupt_of_real_work(big_model: Path, checkout_env: dict[str, str], delay: float, length: int) -> None:
    """Whatever it is at: imports, loading, one long prefill, decoding."""
    prompt = big_model / "long.jsonl"
    prompt.write_text(json.dumps({"prompt": [i % 997 for i in range(length)]}) + "\n")
    args = [
        "generate",
        "-w",
        str(big_model),
        "--prompts-file",
        str(prompt),
        "--ignore-eos",
        "-n",
        "2000" if length > 1 else "32000",
    ]
    process = start(checkout_env, *args)
    time.sleep(delay)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 2
    assert process.returncode == 130 and err == b"cupaged: interrupted\n"
    assert out == b"" or (out.endswith(b"\n") and out.replace(b",", b"").strip().isdigit())


def test_U01_a_reader_that_leaves_ends_real_work(big_model: Path, checkout_env: dict[str, str]) -> None:
    read, write = os.pipe()
    process = start(
        checkout_env, "generate", "-w", str(big_model), "--token-ids", "1", "-n", "32000", "--ignore-eos", stdout=write
    )
    os.close(write)
    assert os.read(read, 1).isdigit()
    os.close(read)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141 and err == b""
    assert time.monotonic() - began < 2


def test_a_warning_about_a_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(GOLDEN / "model.safetensors")
    config = json.loads((GOLDEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "no_such_key": 5}))
    assert main(["generate", "-w", str(folder), "--token-ids", "1", "-n", "1"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("cupaged: warning: ") and "no_such_key" in err and err.count("\n") == 1
