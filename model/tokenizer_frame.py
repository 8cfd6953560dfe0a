"""The frame that a tokenizer puts around a text (usually BOS before it): made, taken from a config, and checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cupaged.errors import TokenizerError
from cupaged.model.config_values import quote

if TYPE_CHECKING:
    import tokenizers


def frame_with(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Make `add_special_tokens` put `bos` before and `eos` behind the text (None: nothing)."""
    from tokenizers import processors

    # Names of ours, not the tokens' texts: in the library's template language ":" and "$" have a meaning.
    named = [(name, token_id) for name, token_id in (("BOS", bos), ("EOS", eos)) if token_id is not None]
    template = ["BOS"] * (bos is not None) + ["$A"] + ["EOS"] * (eos is not None)
    backend.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=named)


def frame_from_config(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], ids: Mapping[str, int | None], source: str
) -> None:
    """add_bos_token / add_eos_token, where stated, replace tokenizer.json's post-processor (as in Transformers 5)."""
    stated = {name: config[name] for name in ("add_bos_token", "add_eos_token") if config.get(name) is not None}
    for name, value in stated.items():
        if not isinstance(value, bool):
            raise TokenizerError(f"{source}: {name} is {quote(value)}, true or false is needed")
    if stated:
        frame_with(
            backend,
            ids.get("bos_token") if stated.get("add_bos_token") else None,
            ids.get("eos_token") if stated.get("add_eos_token") else None,
        )


def check_frame(backend: tokenizers.Tokenizer, source: str) -> None:
    """TokenizerError if the post-processor's template cannot frame one text, or would drop it.

    The library takes such templates; used, they end in a Rust panic, whose stack trace it prints itself, or in a prompt
    without its text.
    """
    if backend.post_processor is None:
        return
    # As with decoders, the pickled state is the library's JSON, and the only way to a processor's settings.
    templates = list(_templates(json.loads(backend.post_processor.__getstate__())))
    if len(templates) > 1:
        raise TokenizerError(f"{source}: post_processor has {len(templates)} templates; only one keeps the text")
    for template in templates:
        pieces = template["single"]
        for name in (piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece):
            if name not in template["special_tokens"]:
                raise TokenizerError(
                    f"{source}: the template of post_processor uses {quote(name)}, which is not among its"
                    " special_tokens"
                )
        texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
        if texts != ["A"]:
            raise TokenizerError(
                f"{source}: the template of post_processor for one text holds {quote(texts)}; it must hold the text,"
                " A, once"
            )


def _templates(processor: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if processor["type"] == "TemplateProcessing":
        yield processor
    for part in processor.get("processors", ()):
        yield from _templates(part)
