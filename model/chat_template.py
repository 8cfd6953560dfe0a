"""Chat templates: a model's own Jinja program that turns messages into prompt text.

The environment is that of Hugging Face ("Writing a chat template" in the Transformers documentation): trim_blocks,
lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` as plain json.dumps, the `{% generation %}`
tag (a marker for training; its body is rendered as it stands).

A template comes from a stranger's file. It runs in Jinja's immutable sandbox, from which no Python object beyond plain
data can be reached and in which messages cannot be changed, without a loader (so no include or import), and within
bounds per rendering: STEPS loop rounds and calls together, CHARS characters printed or joined with "~", the same for
the result of "+", "*" and "%"; `range` up to 100,000 (Jinja's own). These stop endless loops and exploding text. They
are no guarantee: one single operation may still be large, such as str.ljust with a huge width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cupaged.errors import TemplateError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

STEPS = 300_000
CHARS = 1 << 25
SOURCE_CHARS = 1 << 20


class _Budget:
    """What one rendering may still spend."""

    __slots__ = ("chars", "steps")

    def __init__(self) -> None:
        self.steps = STEPS
        self.chars = CHARS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise OverflowError(f"more than {STEPS} loop rounds and calls")

    def text(self, length: int) -> None:
        self.chars -= length
        if self.chars < 0:
            raise OverflowError(f"more than {CHARS} characters")


_budget: ContextVar[_Budget] = ContextVar("chat template budget")


class ChatTemplate:
    """A compiled chat template. `render` may be called from several threads."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, Any]) -> None:
        """`special_tokens` (bos_token, eos_token, ...) are variables of the template. Raises TemplateError if there is
        no template (None) or it is not valid Jinja."""
        if source is None:
            raise TemplateError("the model has no chat template: give a prompt instead of messages")
        if len(source) > SOURCE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters, at most {SOURCE_CHARS} are allowed")
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _compile(source)
        except Exception as error:
            raise _as_template_error("is not valid", error) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        `messages` have "role" (a string) and "content" (a string, a list of parts, or, beside "tool_calls", None).
        `add_generation_prompt` opens the assistant's turn. `variables` are handed to the template; one named like a
        special token replaces it. Encode the result with `add_special_tokens=False`: the template writes BOS itself.
        Raises TemplateError if the messages are malformed or the template fails or refuses them.
        """
        plain = _checked(messages)
        if tools is not None and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence)):
            raise TemplateError(f"tools: a list of tool descriptions is needed, not {type(tools).__name__}")
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in variables:
                raise TemplateError(f"template variable {name!r} is set twice")
        # `documents` is there because Hugging Face always defines it: templates test it for none.
        names = {"documents": None, **self._special_tokens, **variables}
        names |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._generate({**names, "messages": plain})
        except Exception as error:
            # Most templates know text alone: what they fail on is tried again with the parts joined.
            joined = _with_joined_parts(plain)
            if joined is None or isinstance(error, _Refused):
                raise _as_template_error("failed", error) from None
        try:
            return self._generate({**names, "messages": joined})
        except Exception as error:
            raise _as_template_error("failed", error) from None

    def _generate(self, names: Mapping[str, Any]) -> str:
        token = _budget.set(_Budget())
        try:
            length = 0
            chunks: list[str] = []
            for chunk in self._template.generate(names):
                length += len(chunk)
                if length > CHARS:
                    raise OverflowError(f"more than {CHARS} characters")
                chunks.append(chunk)
            return "".join(chunks)
        finally:
            _budget.reset(token)


def _with_joined_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with content in parts made one text; None if none has parts, or a part is not text."""
    changed = False
    joined = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            texts = [part.get("text") for part in content if part.get("type") == "text"]
            if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
                return None
            message, changed = {**message, "content": "".join(texts)}, True
        joined.append(message)
    return joined if changed else None


def _checked(messages: Any) -> list[dict[str, Any]]:
    """The messages as plain dicts; the template cannot change them, so deeper copies are not needed."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages: a list of messages is needed, not {type(messages).__name__}")
    if not messages:
        raise TemplateError("messages: the list is empty")
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise TemplateError(f"{where}: a mapping with role and content is needed, not {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise TemplateError(f"{where}: role is {message.get('role')!r:.40}, a string is needed")
        content = message.get("content")
        parts = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
        if not (isinstance(content, str) or parts or (content is None and message.get("tool_calls"))):
            raise TemplateError(f"{where}: content is {content!r:.40}, a string or a list of parts is needed")
        plain.append(dict(message))
    return plain


class _Refused(Exception):
    """`raise_exception` of a template: its author's own message."""


def _as_template_error(verb: str, error: Exception) -> TemplateError:
    text = " ".join(str(error).split())
    if isinstance(error, _Refused):
        return TemplateError(f"the chat template refused the messages: {text}")
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if isinstance(line, int) else ""
    return TemplateError(f"the chat template {verb}{where}: {type(error).__name__}: {text}")


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML: models were not trained on that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compile(source: str) -> Template:
    """Compile, with the bounds woven in: each loop body begins with a step, each printed or joined text is counted."""
    from jinja2 import nodes

    environment = _environment()
    tree = environment.parse(source)

    def call_filter(name: str, argument: nodes.Expr, line: int) -> nodes.Filter:
        return nodes.Filter(argument, name, [], [], None, None, lineno=line, environment=environment)

    for loop in list(tree.find_all(nodes.For)):
        tick = call_filter("count_step", nodes.Const(None, lineno=loop.lineno, environment=environment), loop.lineno)
        loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno, environment=environment))
    writers: list[nodes.Output | nodes.Concat] = [*tree.find_all(nodes.Output), *tree.find_all(nodes.Concat)]
    for printed in writers:
        printed.nodes = [
            part if isinstance(part, nodes.TemplateData) else call_filter("count_text", part, part.lineno)
            for part in printed.nodes
        ]
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import nodes, pass_context
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            _budget.get().step()
            return super().call(context, obj, *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                for text, count in ((left, right), (right, left)):
                    if isinstance(text, Sequence) and isinstance(count, int):
                        _budget.get().text(len(text) * max(count, 0))
            elif operator == "**" and (abs(left) > 1 << 16 or abs(right) > 64):
                raise OverflowError(f"{left} ** {right} is too large")
            result = super().call_binop(context, operator, left, right)
            if operator != "*" and isinstance(result, Sequence):
                _budget.get().text(len(result))
            return result

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (Jinja declares it a plain set on the class)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    # A filter that takes the context is never evaluated at compile time.
    @pass_context
    def count_step(_: Any, value: Any) -> Any:
        _budget.get().step()
        return value

    @pass_context
    def count_text(_: Any, value: Any) -> Any:
        if isinstance(value, str):
            _budget.get().text(len(value))
        return value

    environment = Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        optimized=False,  # or constant expressions would be computed, unbounded, while compiling
    )
    environment.filters.update(tojson=_tojson, count_step=count_step, count_text=count_text)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment
