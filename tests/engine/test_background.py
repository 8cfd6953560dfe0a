"""The tokenizer is read on a thread of its own while weights are packed: what goes wrong there comes out of `LLM`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from checkpoints import DATA, with_config

from cupaged import LLM, TokenizerError
from cupaged.background import Background


def test_a_result_is_waited_for() -> None:
    go = threading.Event()
    work = Background(lambda: go.wait(10) and threading.current_thread().name)
    go.set()
    assert work.result() == work.result() == "cupaged-background"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_is_raised_where_the_result_is_wanted(error: BaseException) -> None:
    def fail() -> None:
        raise error

    work = Background(fail)
    with pytest.raises(type(error)) as caught:
        work.result()
    assert caught.value is error


def test_a_broken_tokenizer_is_refused_at_load_and_leaves_no_thread(tmp_path: Path) -> None:
    folder = with_config(DATA / "llama", tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    before = set(threading.enumerate())
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        LLM(folder, device="cpu", kv_memory="1MiB")
    assert set(threading.enumerate()) == before
    with LLM(folder, device="cpu", kv_memory="1MiB", tokenizer=False) as llm:
        assert llm.tokenizer is None
        assert len(llm.generate([5, 6, 7])[0].token_ids) > 0
