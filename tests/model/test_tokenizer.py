"""Tokenizers of Hub folders and what all tokenizers share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_support import DATA, small, smollm2
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from cupaged.errors import TokenizerError
from cupaged.model.chat_template import ChatTemplate
from cupaged.model.tokenizer import Tokenizer, generation_eos_ids, load_tokenizer

LETTERS = [*"abcdefgh", "Ġ", "</s>"]


def backend() -> Backend:
    """Ten letters (ids 0..9, "</s>" an ordinary token) and <s> (10), special."""
    tokenizer = Backend(models.BPE(vocab={text: i for i, text in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


def folder_with(path: Path, tokenizer: Backend | None = None, **files: Any) -> Path:
    """A folder with tokenizer.json and NAME.json (an object) or NAME.jinja (a string) for each keyword."""
    (path / "tokenizer.json").write_text((tokenizer or backend()).to_str(), encoding="utf-8")
    for name, value in files.items():
        if isinstance(value, str):
            (path / f"{name}.jinja").write_text(value, encoding="utf-8")
        else:
            (path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return path


def load(path: Path, config: dict[str, Any] | None = None) -> Tokenizer:
    tokenizer = load_tokenizer(path, "hub", config or {})
    assert tokenizer is not None
    return tokenizer


def golden_cases() -> list[dict[str, Any]]:
    return json.loads((DATA / "smollm2-135m.json").read_text(encoding="utf-8"))["cases"]


def hub_smollm2(path: Path) -> Tokenizer:
    """The Hub folder that the GGUF was made of, as far as the tokenizer goes."""
    gguf = smollm2()
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": gguf.chat_template}
    return load(folder_with(path, gguf._backend, tokenizer_config=config))


@pytest.mark.parametrize("kind", ["gguf", "hub"])
def test_prompt_ids_of_a_real_model_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    tokenizer = smollm2() if kind == "gguf" else hub_smollm2(tmp_path)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    kinds = set()
    for case in golden_cases():
        kinds.add(case["kind"])
        if case["kind"] == "chat":
            text = template.render([{"role": "user", "content": case["prompt"]}])
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(case["prompt"])
        assert ids == case["prompt_ids"], case["prompt"]
        assert tokenizer.decode(case["greedy_ids"], skip_special_tokens=False) == case["text"]
    assert kinds == {"text", "chat"}
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, {2})


def test_special_tokens_written_in_a_prompt_are_parsed_and_skipped_in_output() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("a<|im_end|>b")
    assert ids == [81, 2, 82]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
    assert [tokenizer.is_special(token) for token in ids] == [False, True, False]
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"


def test_C01_a_template_that_writes_bos_gives_one_bos(tmp_path: Path) -> None:
    tokenizer_config = {"bos_token": "<s>", "add_bos_token": True}
    tokenizer = load(folder_with(tmp_path, tokenizer_config=tokenizer_config, chat_template="{{ bos_token }}abc"))
    rendered = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens).render([{"role": "user", "content": ""}])
    assert tokenizer.encode(rendered, add_special_tokens=False) == [10, 0, 1, 2]
    assert tokenizer.encode("abc") == [10, 0, 1, 2]
    assert tokenizer.encode(rendered) == [10, 10, 0, 1, 2]  # the fault, had the frame been left on


def test_token_text_is_what_a_token_adds_in_the_middle_of_a_text() -> None:
    assert [smollm2().token_text(i) for i in (504, 3575, 2, 216, 49152)] == ["The", " capital", "<|im_end|>", " ", ""]
    llama = small("llama")
    texts = {llama.token_string(i): llama.token_text(i) for i in range(llama.vocab_size)}
    assert (texts["▁a"], texts["a"], texts["<0x41>"], texts["<0xE4>"]) == (" a", "a", "A", "\ufffd")


@pytest.mark.parametrize("bad", [-1, 2**32, 5279552648203111001, "7", 1.5])
def test_T09_impossible_ids_are_refused_and_named(bad: Any) -> None:
    tokenizer = smollm2()
    with pytest.raises(TokenizerError, match=str(bad)):
        tokenizer.decode([5, bad])
    with pytest.raises(TokenizerError, match=str(bad)):
        tokenizer.detokenizer().push(bad)


def test_ids_past_the_vocabulary_show_nothing_as_models_pad_their_heads() -> None:
    assert smollm2().decode([504, 49152, 50000]) == "The"
    assert smollm2().decode(np.array([504, 3575])) == "The capital"


@pytest.mark.parametrize("text, named", [("a\ud800b", "character 1"), (b"a", "bytes"), (None, "NoneType")])
def test_text_that_cannot_be_encoded_is_refused(text: Any, named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        smollm2().encode(text)


def test_empty_text_gives_the_frame_alone(tmp_path: Path) -> None:
    assert smollm2().encode("") == []
    framed = load(folder_with(tmp_path, tokenizer_config={"bos_token": "<s>", "add_bos_token": True}))
    assert framed.encode("") == [10]


def test_M13_eos_is_the_union_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, generation_config={"eos_token_id": [3, 4]}, tokenizer_config={"eos_token": "</s>"})
    assert load(folder, {"eos_token_id": 5}).eos_token_ids == {3, 4, 5, 9}
    assert load(folder, {"eos_token_id": None}).eos_token_ids == {3, 4, 9}
    assert generation_eos_ids(folder) == {3, 4}
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert load(folder).eos_token_ids == frozenset()


@pytest.mark.parametrize("value", ["2", [1, "2"], -1, 1.5, True, {}])
def test_M13_a_malformed_eos_is_refused(value: Any, tmp_path: Path) -> None:
    folder_with(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id"):
        load(tmp_path)


def test_a_named_special_token_is_special_though_tokenizer_json_has_it_as_text(tmp_path: Path) -> None:
    plain = load(folder_with(tmp_path))
    assert not plain.is_special(9)
    tokenizer = load(folder_with(tmp_path, tokenizer_config={"eos_token": {"content": "</s>"}, "pad_token": "<pad>"}))
    assert tokenizer.encode("a</s>") == [0, 9]
    assert tokenizer.decode([0, 9]) == "a"
    # <pad> is not in the vocabulary: a template may print it, but it gets no id past the model's embedding
    assert tokenizer.special_tokens["pad_token"] == "<pad>"
    assert tokenizer.vocab_size == 11


def test_special_tokens_map_fills_what_tokenizer_config_leaves_open(tmp_path: Path) -> None:
    folder_with(
        tmp_path,
        tokenizer_config={"bos_token": "<s>", "eos_token": None},
        special_tokens_map={"bos_token": "a", "eos_token": "</s>", "additional_special_tokens": ["b"]},
    )
    tokenizer = load(tmp_path)
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "additional_special_tokens": ["b"],
    }
    assert tokenizer.eos_token_ids == {9}
    assert tokenizer.is_special(1)


def test_tokens_that_only_tokenizer_config_declares_are_added_at_their_ids(tmp_path: Path) -> None:
    def config(token_id: int) -> dict[str, Any]:
        return {"added_tokens_decoder": {str(token_id): {"content": "<tool>", "special": False, "normalized": False}}}

    tokenizer = load(folder_with(tmp_path, tokenizer_config=config(11)))
    assert tokenizer.encode("a<tool>") == [0, 11]
    assert tokenizer.decode([0, 11]) == "a<tool>"
    folder_with(tmp_path, tokenizer_config=config(15))
    with pytest.raises(TokenizerError, match=r"'<tool>' has id 15, by tokenizer\.json it would have 11"):
        load(tmp_path)


@pytest.mark.parametrize(
    "stated, ids",
    [({}, [10, 0]), ({"add_bos_token": False}, [0]), ({"add_bos_token": True, "add_eos_token": True}, [10, 0, 9])],
)
def test_a_stated_frame_replaces_that_of_tokenizer_json(
    stated: dict[str, bool], ids: list[int], tmp_path: Path
) -> None:
    framed = backend()
    framed.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], pair=None, special_tokens=[("<s>", 10)])
    config = {"bos_token": "<s>", "eos_token": "</s>", **stated}
    assert load(folder_with(tmp_path, framed, tokenizer_config=config)).encode("a") == ids


def test_truncation_and_padding_in_tokenizer_json_do_not_touch_prompts(tmp_path: Path) -> None:
    tokenizer = backend()
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=8, pad_id=0, pad_token="a")
    assert tokenizer.encode("abcdefgh").ids == [0, 1, 2, 0, 0, 0, 0, 0]
    assert load(folder_with(tmp_path, tokenizer)).encode("abcdefgh") == [0, 1, 2, 3, 4, 5, 6, 7]


def test_chat_template_sources_in_their_order(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "config"}]
    assert load(folder_with(tmp_path)).chat_template is None
    assert load(folder_with(tmp_path, tokenizer_config={"chat_template": several})).chat_template == "config"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert load(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load(tmp_path).chat_template == "jinja"


def test_line_ends_of_a_template_file_are_those_of_text(tmp_path: Path) -> None:
    folder_with(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"a\r\nb\rc\n")
    assert load(tmp_path).chat_template == "a\nb\nc\n"


def test_templates_with_odd_names_are_passed_over(tmp_path: Path) -> None:
    odd = [{"name": {}, "template": "x"}, {"name": "default", "template": "y"}, 5]
    assert load(folder_with(tmp_path, tokenizer_config={"chat_template": odd})).chat_template == "y"
    assert load(folder_with(tmp_path, tokenizer_config={"chat_template": odd[:1]})).chat_template is None


def test_a_tokenizer_that_loads_and_yet_does_not_fit_together_is_named_when_used(tmp_path: Path) -> None:
    tokenizer = Backend(models.BPE(vocab={"a": 0}, merges=[], unk_token="<nowhere>"))
    tokenizer.decoder = decoders.ByteLevel()
    loaded = load(folder_with(tmp_path, tokenizer))
    assert loaded.encode("a") == [0]
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*<nowhere>"):
        loaded.encode("b")


def piece(kind: str, name: str) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": 0}}


TEXT, FRAME = piece("Sequence", "A"), piece("SpecialToken", "X")
DECLARED = {"X": {"id": "X", "ids": [10], "tokens": ["<s>"]}}


def template(single: list[Any], declared: dict[str, Any] = DECLARED) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": declared}


def framed(path: Path, processor: dict[str, Any], **files: Any) -> Path:
    folder_with(path, **files)
    data = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    (path / "tokenizer.json").write_text(json.dumps({**data, "post_processor": processor}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "processor, reason",
    [
        (template([FRAME, TEXT], {}), "uses 'X', which is not among its special_tokens"),
        (template([FRAME]), r"holds \[\]; it must hold the text, A, once"),
        (template([FRAME, piece("Sequence", "B")]), r"holds \['B'\]"),
        (template([TEXT, FRAME, TEXT]), r"holds \['A', 'A'\]"),
        ({"type": "Sequence", "processors": [template([FRAME, TEXT], {})]}, "uses 'X'"),
        ({"type": "Sequence", "processors": [template([FRAME, TEXT])] * 2}, "has 2 templates"),
    ],
    ids=["undeclared", "without_the_text", "second_text", "text_twice", "undeclared_within", "two"],
)
def test_a_frame_that_cannot_work_is_refused_at_load_and_not_by_a_panic(
    processor: dict[str, Any], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    framed(tmp_path, processor)
    with pytest.raises(TokenizerError, match=reason) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'}: ")
    assert capfd.readouterr().err == ""  # a panic prints its stack trace whoever catches it


def test_sound_frames_are_left_alone_and_a_stated_one_mends_the_file(tmp_path: Path) -> None:
    assert load(framed(tmp_path, template([FRAME, TEXT]))).encode("ab") == [10, 0, 1]
    trim = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert load(framed(tmp_path, {"type": "Sequence", "processors": [trim, template([TEXT, FRAME])]})).encode("ab") == [
        0, 1, 10,
    ]  # fmt: skip
    stated = {"add_bos_token": True, "bos_token": "<s>"}
    assert load(framed(tmp_path, template([]), tokenizer_config=stated)).encode("ab") == [10, 0, 1]


def test_text_that_a_vocabulary_cannot_hold_is_refused_with_the_files_name(tmp_path: Path) -> None:
    tokenizer = Backend(models.Unigram([("a", -1.0)]))
    loaded = load(folder_with(tmp_path, tokenizer))
    assert loaded.encode("a") == [0]
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*unk_id"):
        loaded.encode("hello")


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": "\ud800"},
        {"eos_token": {"content": "a\udfff"}},
        {"additional_special_tokens": ["<s>", "\ud800"]},
        {"extra_special_tokens": {"image": "\ud800"}},
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map"])
def test_a_special_token_that_is_no_text_is_refused(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"special token .*half a surrogate pair") as caught:
        load(folder_with(tmp_path, **{name: config}))
    assert str(caught.value).startswith(str(tmp_path))


def test_a_folder_without_a_tokenizer_gives_none_but_one_of_another_kind_says_so(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, "hub", {}) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model but no tokenizer\.json"):
        load_tokenizer(tmp_path, "hub", {})


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer.json", b'{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":["a b"]}}'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[" * 200_000),
        ("tokenizer_config.json", b'{"add_bos_token": "yes"}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"11": {}}}'),
        ("generation_config.json", b"nonsense"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_named_in_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    folder_with(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        load(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_L10_links_are_followed_and_a_broken_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    folder_with(tmp_path / "blobs")
    link = tmp_path / "snapshot" / "tokenizer.json"
    os.symlink("../blobs/tokenizer.json", link)
    assert load(tmp_path / "snapshot").encode("ab") == [0, 1]
    (tmp_path / "blobs" / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"broken link to \.\./blobs/tokenizer\.json"):
        load(tmp_path / "snapshot")


def test_X05_nothing_of_a_model_folder_is_imported(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    auto_map = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    assert load(folder_with(tmp_path, tokenizer_config=auto_map)).encode("ab") == [0, 1]
    assert not marker.exists()
