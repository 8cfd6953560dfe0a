"""Chat templates render as Hugging Face renders them, and a hostile one gets nothing and holds nothing up."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cupaged.errors import TemplateError
from cupaged.model import chat_template
from cupaged.model.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HI, special: Mapping[str, Any] | None = None, **options: Any) -> str:
    return ChatTemplate(source, special or {}).render(messages, **options)


ROLES = (
    "{% for m in messages %}\n  {% if m.role == 'user' %}\nU:{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\nA:{% endif %}"
)
BREAK = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
CONTINUE = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}"
NEIGHBOURS = "{% for m in messages %}{{ loop.length }}{{ loop.last }}{{ loop.previtem is defined }} {% endfor %}"
NAMESPACE = (
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source, messages, expected",
    [
        (ROLES, HI, "U:hi\nA:"),
        ("{{ messages[0].content | tojson }}", [{"role": "user", "content": "ü<&>'"}], '"ü<&>\'"'),
        ("{{ messages[0] | tojson(indent=1) }}", HI, '{\n "role": "user",\n "content": "hi"\n}'),
        (BREAK, HI * 3, "user"),
        (CONTINUE, HI * 3, "23"),
        (NEIGHBOURS, HI * 2, "2FalseFalse 2TrueTrue "),
        (NAMESPACE + "{{ ns.n }}", HI * 2, "2"),
        ("{% generation %}{% set a = 1 %}{{ messages[0]['content'] }}{% endgeneration %}!{{ a }}", HI, "hi!"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages[0].role) ~ m(1) }}", HI, "[user][1]"),
        (
            "{{ 'a' * 3 }}{{ 2 ** 10 }}{{ [1] + [2] }}{{ '%s-%d' % ('x', 3) }}{{ 7 % 4 }}{{ 1.5 + 1 }}",
            HI,
            "aaa1024[1, 2]x-332.5",
        ),
        ("{{ documents is none }}{{ tools is none }}", HI, "TrueTrue"),
        ("{{ messages[0].content }}\n", HI, "hi"),
    ],
)
def test_C02_the_environment_is_that_of_hugging_face(source: str, messages: Any, expected: str) -> None:
    assert render(source, messages) == expected


def plain_environment() -> ImmutableSandboxedEnvironment:
    """Hugging Face's environment as its documentation states it, without our bounds."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment


# In the manner of the templates that models with tools and reasoning come with.
RICH = """
{%- macro text_of(content, trim=true) -%}
    {%- if content is string -%}
        {{- content | trim if trim else content -}}
    {%- else -%}
        {%- for p in content -%}
            {%- if p.type == 'text' %}{{ p['text'] }}{% else %}{{ '<' ~ p.type ~ loop.index ~ '>' }}{% endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(open=true, last=messages|length - 1, tools='') -%}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}{% set ns.tools = ns.tools + (tool | tojson) + '\n' %}{% endfor %}
    {{- ns.tools + '</tools>\n' }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == 'user' and not text_of(message.content).startswith('<result>') %}
        {%- set ns.open, ns.last = false, index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages if message.role != 'developer' %}
    {%- set content = text_of(message.content or '', trim=not loop.last) %}
    {%- if loop.previtem is defined and loop.previtem.role == message.role %}{{ '(again)' }}{% endif %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim %}
        {%- set content = content.split('</think>')|last %}
        {{- '%s[%d] ' % (thought, loop.index) if loop.index0 >= ns.last else '' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] recursive %}
        {{- call.name ~ '(' }}{% for k, v in (call.arguments or {})|dictsort %}{{ k }}={{ v | tojson }}
        {%- if not loop.last %}, {% endif %}{% endfor %}{{ ')' }}{{ loop(call.inner) if call.inner }}
    {%- else %}
        {{- message.role | upper }}: {{ content -}}
    {%- endfor %}
    {{ '\n' * 2 }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% else %}{{ bos_token|default('-') * 3 }}{% endif %}
"""
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": " ü <b> "},
    {"role": "developer", "content": "hidden"},
    {"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "image"}]},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "<think> hm </think>yes"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"name": "f", "arguments": {"b": 1.5, "a": "é'"}, "inner": [{"name": "g"}]}],
    },
    {"role": "user", "content": "<result> 5 "},
]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    "source", [ROLES, BREAK, CONTINUE, NEIGHBOURS, RICH], ids=["roles", "break", "continue", "loop", "rich"]
)
def test_C02_the_bounds_change_nothing(source: str, prompt: bool) -> None:
    names = {"messages": CONVERSATION, "add_generation_prompt": prompt, "tools": [{"name": "f", "unit": "°"}]}
    expected = plain_environment().from_string(source).render(**names)
    assert render(source, CONVERSATION, tools=names["tools"], add_generation_prompt=prompt) == expected
    if source is RICH:
        assert 'f(a="é\'", b=1.5)g()' in expected
        assert "hm[4] ASSISTANT: yes" in expected


def test_C02_special_tokens_and_variables() -> None:
    source = "{{ bos_token }}{{ enable_thinking }}{{ tools[0].name }}"
    options = {"special": {"bos_token": "<s>"}, "tools": [{"name": "f"}], "enable_thinking": False}
    assert render(source, **options) == "<s>Falsef"
    assert render(source, **{**options, "bos_token": "<b>"}) == "<b>Falsef"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_C02_strftime_now_is_the_local_date() -> None:
    before = datetime.now().strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}") in (before, datetime.now().strftime("%d %b %Y"))


def test_C02_raise_exception_is_the_templates_own_refusal() -> None:
    with pytest.raises(TemplateError, match=r"^the chat template refused the messages: roles must alternate$"):
        render("{{ raise_exception('roles must\n alternate') }}")


def hostile(marker: Path) -> list[str]:
    command = f"touch {marker}"
    return [
        f"{{{{ cycler.__init__.__globals__.os.popen('{command}').read() }}}}",
        f"{{{{ lipsum.__globals__['os'].system('{command}') }}}}",
        f"{{{{ ''.__class__.__mro__[1].__subclasses__()[0]('{command}') }}}}",
        f"{{{{ raise_exception.__globals__['json'].codecs.open('{marker}', 'w') }}}}",
        f"{{{{ (messages|attr('__class__')|attr('__init__')|attr('__globals__'))['os'].system('{command}') }}}}",
        f"{{{{ '{{0.__class__.__init__.__globals__}}'.format(messages).x('{command}') }}}}",
        "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].__setitem__('role', 'system') }}",
        "{% set messages[0].role = 'system' %}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
    ]


@pytest.mark.parametrize("index", range(12))
def test_X01_a_template_cannot_leave_the_sandbox_or_change_the_messages(index: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    sources = hostile(marker)
    assert len(sources) == 12
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError):
        render(sources[index], messages)
    assert not marker.exists()
    assert messages == HI


DOUBLING = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set STATEMENT %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [0] }}",
        "{{ 9 ** 9 ** 9 }}",
        DOUBLING.replace("STATEMENT", "ns.s = ns.s ~ ns.s"),
        DOUBLING.replace("STATEMENT", "ns.s = ns.s + ns.s"),
        DOUBLING.replace("STATEMENT", "ns.s = '%s%s' % (ns.s, ns.s)"),
        DOUBLING.replace("STATEMENT", "x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [[1, 1]] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    ],
)
def test_endless_work_and_exploding_text_are_stopped(source: str) -> None:
    start = time.process_time()
    with pytest.raises(TemplateError, match="OverflowError"):
        render(source)
    assert time.process_time() - start < 10


def test_bounds_are_per_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "STEPS", 100)
    template = ChatTemplate("{% for m in messages %}{{ m.content.strip() }}{% endfor %}", {})
    assert [template.render(HI * 50) for _ in range(3)] == ["hi" * 50] * 3
    with pytest.raises(TemplateError, match="more than 100 loop rounds and calls"):
        template.render(HI * 51)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{",
        "{% endfor %}",
        "{% generation %}",
        "{{ x | nosuchfilter }}",
        "{{" + "(" * 3000 + ")" * 3000 + "}}",
        "{% for a in b %}" * 60 + "{% endfor %}" * 60,
        "x" * (chat_template.SOURCE_CHARS + 1),
    ],
    ids=lambda source: source[:20],
)
def test_a_template_that_is_not_jinja_is_refused_when_loaded(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source, {})
    assert "\n" not in str(caught.value)


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(TemplateError, match="line 3"):
        ChatTemplate("a\nb\n{% if %}", {})


def test_no_template_is_said_plainly() -> None:
    with pytest.raises(TemplateError, match="the model has no chat template"):
        ChatTemplate(None, {})


@pytest.mark.parametrize(
    "source, named", [("{{ messages[7].content }}", "UndefinedError"), ("{{ 1 + messages[0].role }}", "TypeError")]
)
def test_a_failing_template_says_how(source: str, named: str) -> None:
    with pytest.raises(TemplateError, match=named):
        render(source)


@pytest.mark.parametrize(
    "messages, named",
    [
        ("hi", "messages: a list"),
        ({"role": "user", "content": "hi"}, "messages: a list"),
        (None, "messages: a list"),
        ([], "messages: the list is empty"),
        ([*HI, "hi"], r"messages\[1\]: a mapping"),
        ([*HI, {"content": "hi"}], r"messages\[1\]: role is None"),
        ([{"role": 1, "content": "hi"}], r"messages\[0\]: role is 1"),
        ([{"role": "user"}], r"messages\[0\]: content is None"),
        ([{"role": "user", "content": 5}], r"messages\[0\]: content is 5"),
        ([{"role": "user", "content": b""}], r"messages\[0\]: content is b''"),
        ([{"role": "user", "content": ["hi"]}], r"messages\[0\]: content is \['hi'\]"),
    ],
)
def test_malformed_messages_are_refused_with_their_index(messages: Any, named: str) -> None:
    with pytest.raises(TemplateError, match=named):
        render("x", messages)


def test_parts_and_tool_calls_are_messages_too() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert render("{{ messages[0].content[0].text }}", parts) == "hi"
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    assert render("{{ messages[1].tool_calls[0].type }}", [*HI, call]) == "function"


def test_tools_and_variables_are_checked() -> None:
    with pytest.raises(TemplateError, match="tools: a list"):
        render("x", tools={"name": "f"})
    with pytest.raises(TypeError):
        ChatTemplate("x", {}).render(HI, messages=HI)  # type: ignore[misc]


def test_text_parts_are_joined_for_a_template_that_knows_text_alone() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert render("{{ '<' + messages[0].content + '>' }}", parts) == "<hi>"
    with pytest.raises(TemplateError, match="can only concatenate"):
        render("{{ '<' + messages[0].content + '>' }}", [{"role": "user", "content": [{"type": "image"}]}])
