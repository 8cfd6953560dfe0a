"""Text to token ids and back, over the `tokenizers` library, from a Hub folder or a GGUF file's metadata.

Deliberately not done: tokenizers that exist as sentencepiece or vocab/merges files alone (tokenizer.json is needed);
Hugging Face's `clean_up_tokenization_spaces`, which changes what the model wrote; `auto_map` and any other code from a
model folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cupaged.errors import TokenizerError
from cupaged.model.config_values import quote
from cupaged.model.detokenizer import Detokenizer, compile_decoder
from cupaged.model.regular_file import read_regular
from cupaged.model.tokenizer_frame import check_frame, frame_from_config

if TYPE_CHECKING:
    import tokenizers

# The names under which Hugging Face hands special tokens to chat templates.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_MAX_BYTES = 256 << 20  # of one file; the largest tokenizer.json of a quarter of a million tokens has 33 million
_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "tekken.json", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens that a model treats apart. `texts` is by name (bos_token, eos_token, ...), as chat templates want them."""

    texts: Mapping[str, str | list[str]] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()


class Tokenizer:
    """One model's tokenizer. All methods may be called from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        chat_template: str | None,
        source: str,
    ) -> None:
        """`source` names the file in messages. Raises TokenizerError if the decoder is one we do not know."""
        # A truncation or padding setting in the file is a training script's leavings; it would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = special
        self._source = source
        self.chat_template = chat_template
        # Special is a matter of the text, as in the library: two ids with one text are both special.
        self._special_texts = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        # The library has no accessor for a decoder's settings but its pickled state, which is its JSON.
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        try:
            self._make_stages = compile_decoder(decoder)
        except TokenizerError as error:
            raise TokenizerError(f"{source}: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text are parsed as such, as in Hugging Face.

        With `add_special_tokens` the tokenizer's own frame (usually BOS) is put around; for text rendered by a chat
        template it must be off, since the template writes BOS itself. Raises TokenizerError for text that is no str or
        holds half a surrogate pair. Empty text gives the frame alone, so maybe [].
        """
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not isinstance(text, str):
                raise TokenizerError(f"cannot encode: text is needed, not {type(text).__name__}") from None
            half = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if half is None:  # a tokenizer.json that loads and yet does not fit together
                raise backend_error(self._source, error) from None
            raise TokenizerError(
                f"cannot encode: character {half} ({text[half]!r}) is half a surrogate pair, not text"
            ) from None
        return encoding.ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids unknown to the vocabulary (padding rows of a model's head) give nothing.

        Raises TokenizerError, naming the id, for what cannot be an id at all: negative, over 2**32 - 1, no integer.
        """
        numbers = list(ids)
        try:
            return self._backend.decode(numbers, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            for number in numbers:
                self.token_string(number)  # raises for the one at fault
            raise backend_error(self._source, error) from None

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh stream whose text equals `decode(ids, skip_special_tokens)` in the end."""
        if not skip_special_tokens:
            return Detokenizer(self.token_string, self._make_stages())

        return Detokenizer(self._shown, self._make_stages())

    @cached_property
    def _shown(self) -> Callable[[int], str | None]:
        """A token's string, None for special ones. The same come up again and again, and the library takes 1 us for
        each."""

        @lru_cache(maxsize=4096)
        def shown(token_id: int) -> str | None:
            string = self.token_string(token_id)
            return None if string in self._special_texts else string

        return shown

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it ("Ġthe", "▁the", "<0x0A>"), None if there is no such token."""
        try:
            return self._backend.id_to_token(token_id)
        except (TypeError, OverflowError):
            raise TokenizerError(f"token id {token_id!r} is not possible: 0 .. {self.vocab_size - 1}") from None

    def token_text(self, token_id: int) -> str:
        """What the token adds in the middle of a text (" the"), special ones included; for display beside logprobs.

        A token that is part of a character shows U+FFFD; "" if there is no such token.
        """
        string = self.token_string(token_id)
        if string is None:
            return ""
        # Some token must stand before it, or a leading-space rule would apply.
        stream = Detokenizer(lambda _: None, self._make_stages())
        before = stream.push_string("x")
        return (before + stream.push_string(string) + stream.finish())[1:]

    def is_special(self, token_id: int) -> bool:
        return self.token_string(token_id) in self._special_texts

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id plus one. A model's own vocabulary may be larger (padded)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self._special.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text: the union of what config, generation_config and tokenizer declare."""
        return self._special.eos_token_ids

    @property
    def special_tokens(self) -> Mapping[str, str | list[str]]:
        """Texts by name, for chat templates: bos_token, eos_token, ..., additional_special_tokens (a list)."""
        return self._special.texts


def load_tokenizer(path: Path, kind: Literal["hub", "gguf"], metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a model, None if it has none (the engine then works with token ids alone).

    kind "hub": `path` is a folder, `metadata` its parsed config.json (for eos_token_id and bos_token_id; may be empty).
    Read are tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json,
    chat_template.jinja and chat_template.json, each where present.
    kind "gguf": `path` is the file (for messages alone), `metadata` its key-value pairs.
    Raises TokenizerError, naming file and reason, for a tokenizer that is broken or of an unsupported kind.
    """
    if kind == "gguf":
        from cupaged.model.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(metadata, str(path))
    return _tokenizer_from_folder(path, metadata)


def generation_eos_ids(folder: Path) -> frozenset[int]:
    """eos_token_id of the folder's generation_config.json (an integer, a list or null); empty where there is none."""
    file = folder / "generation_config.json"
    return eos_ids(_read_json(file) or {}, str(file))


def eos_ids(config: Mapping[str, Any], source: str) -> frozenset[int]:
    """`eos_token_id` of a parsed config: an integer, a list of them, or null. `source` names it in TokenizerError."""
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise TokenizerError(f"{source}: eos_token_id {value!r} is not an id, a list of ids, or null")
    return frozenset(ids)


def backend_error(source: str, error: BaseException) -> TokenizerError:
    """The library's own failures, Rust panics (which are no Exception) included, as one line of ours.

    Anything else that is no Exception (KeyboardInterrupt) is raised again.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return TokenizerError(f"{source}: {' '.join(str(error).split())}")


def _tokenizer_from_folder(folder: Path, model_config: Mapping[str, Any]) -> Tokenizer | None:
    file = folder / "tokenizer.json"
    text = _read(file)
    if text is None:
        others = [name for name in _OTHER_FORMATS if (folder / name).exists()]
        if others:
            raise TokenizerError(f"{folder}: holds {', '.join(others)} but no tokenizer.json, which is needed")
        return None
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(text)
    except BaseException as error:
        raise backend_error(str(file), error) from None

    config_file = folder / "tokenizer_config.json"
    config = _read_json(config_file) or {}
    # tokenizer_config.json says what special_tokens_map.json says, and wins where they differ.
    texts = _special_texts(
        {**(_read_json(folder / "special_tokens_map.json") or {}), **_without_nulls(config)}, str(folder)
    )
    _add_tokens(backend, config, texts, str(config_file))
    ids = {name: backend.token_to_id(value) for name, value in texts.items() if isinstance(value, str)}

    bos = ids.get("bos_token")
    if bos is None:
        bos = _optional_id(model_config, "bos_token_id", str(folder / "config.json"))
    eos = eos_ids(model_config, str(folder / "config.json")) | generation_eos_ids(folder)
    named_eos = ids.get("eos_token")
    if named_eos is not None:
        eos |= {named_eos}
    frame_from_config(backend, config, ids, str(config_file))
    check_frame(backend, str(file))
    special = SpecialTokens(texts, bos, eos)
    tokenizer = Tokenizer(backend, special, _chat_template(folder, config), str(file))
    tokenizer.encode("")  # whatever else fails for every text had better fail now
    return tokenizer


def _special_texts(config: Mapping[str, Any], source: str) -> dict[str, str | list[str]]:
    """Special tokens by name; each is written as a string or as an object with "content"."""

    def text_of(value: Any) -> str | None:
        content = value.get("content") if isinstance(value, Mapping) else value
        if not isinstance(content, str):
            return None
        if any("\ud800" <= char <= "\udfff" for char in content):  # JSON can write it, no vocabulary can hold it
            raise TokenizerError(f"{source}: special token {quote(content)} holds half a surrogate pair, not text")
        return content

    texts: dict[str, str | list[str]] = {}
    for name in SPECIAL_NAMES:
        text = text_of(config.get(name))
        if text is not None:
            texts[name] = text
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")  # Transformers 4 and 5
    values = list(extra.values()) if isinstance(extra, Mapping) else extra if isinstance(extra, list) else []
    listed = [text for text in map(text_of, values) if text is not None]
    if listed:
        texts["additional_special_tokens"] = listed
    return texts


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], texts: Mapping[str, str | list[str]], source: str
) -> None:
    """Tokens that tokenizer_config.json adds to tokenizer.json, as Hugging Face does on loading.

    `added_tokens_decoder` may add tokens, at the ids it states. Named special tokens are made special, unless they are
    not in the vocabulary at all: Hugging Face would give those ids past the model's embedding.
    """
    from tokenizers import AddedToken

    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    try:
        entries = sorted((int(key), dict(value)) for key, value in declared.items())
        for token_id, entry in entries:
            content = entry["content"]
            if content in present:
                continue
            flags = {key: bool(entry.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "special")}
            normalized = bool(entry.get("normalized", not flags["special"]))
            backend.add_tokens([AddedToken(content, normalized=normalized, **flags)])
            if backend.token_to_id(content) != token_id:
                raise TokenizerError(
                    f"{source}: added token {content!r} has id {token_id}, by tokenizer.json it would have"
                    f" {backend.token_to_id(content)}"
                )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{source}: added_tokens_decoder is malformed ({error})") from None
    named = [text for value in texts.values() for text in ([value] if isinstance(value, str) else value)]
    already = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(named)
            if text not in already and backend.token_to_id(text) is not None
        ]
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template. Its own file wins over chat_template.json, and that over tokenizer_config.json."""
    text = _read(folder / "chat_template.jinja")
    if text is not None:
        return text.replace("\r\n", "\n").replace("\r", "\n")
    for source in (_read_json(folder / "chat_template.json") or {}, config):
        template = source.get("chat_template")
        if isinstance(template, list):  # several, each {"name": ..., "template": ...}
            named = [item for item in template if isinstance(item, Mapping) and item.get("name") == "default"]
            template = named[-1].get("template") if named else None
        if isinstance(template, str):
            return template
    return None


def _optional_id(config: Mapping[str, Any], key: str, source: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TokenizerError(f"{source}: {key} {value!r} is not a token id or null")
    return value


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _read(file: Path) -> str | None:
    """The text of a file, None if it is not there."""
    try:
        return read_regular(file, _MAX_BYTES).decode("utf-8")
    except FileNotFoundError:
        if file.is_symlink():  # as in a Hub cache from which a blob was removed
            raise TokenizerError(f"{file}: file missing (broken link to {file.readlink()})") from None
        return None
    except OSError as error:
        raise TokenizerError(f"{file}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: not UTF-8 ({error})") from None


def _read_json(file: Path) -> dict[str, Any] | None:
    """A JSON object from a file, None if the file is not there."""
    text = _read(file)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: a JSON object is needed, this is a {type(value).__name__}")
    return value
