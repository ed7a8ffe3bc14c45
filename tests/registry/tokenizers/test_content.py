"""Content never becomes a control token, and all other prompts keep their ids."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from millrace.registry.catalogue import load_catalogue
from millrace.registry.chat_template import ChatTemplate
from millrace.registry.served import ServedModel
from millrace.registry.template_text import TemplateText, filled, joined, literal
from millrace.registry.tokenizers.content import ContentTokenizer
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.tools import ToolCall, ToolDefinition, ToolFormat
from tests.registry.tokenizers.forged import CONTROL, FORGED, QWEN, write_models
from tests.registry.tool_formats.templates import FAMILIES
from tests.support.engine.tokenizers_made import TEXTS, byte_fallback, byte_level

# As Llama's and others': the role is in the token, a token begins the first content.
ROLES = """\
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if loop.first %}{% set content = bos_token + content %}{% endif %}
    {{- '<|' ~ message.role ~ '|>' }}{{ content ~ "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def _added() -> list[AddedToken]:
    """Return a tokenizer with control tokens of every kind, and plain words that extend a
    vocabulary."""
    return [
        AddedToken("<|im_start|>", special=True, normalized=False),
        AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True),
        AddedToken("<think>", special=False, normalized=False),
        AddedToken("</think>", special=False, normalized=False, lstrip=True),
        AddedToken("<tool_call>", special=False, normalized=False),
        AddedToken("</tool_call>", special=False, normalized=False, single_word=True),
        AddedToken("\n\n", special=False, normalized=False),
        AddedToken("wheel", special=False),
    ]


def _unigram(special_tokens: Sequence[str] = ("<unk>", "<s>", "</s>")) -> tokenizers.Tokenizer:
    """Return a Unigram tokenizer, which finds control tokens of its vocabulary in any text; BPE
    does not."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=list(special_tokens),
        unk_token="<unk>",
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS, "".join(CONTROL)], trainer)
    return made


def _whole_words() -> tokenizers.Tokenizer:
    words = {"<unk>": 0, "<|im_end|>": 1, "mill": 2, "race": 3}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def _with(backend: tokenizers.Tokenizer, normalizer: Any = None) -> tokenizers.Tokenizer:
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(_added())
    return backend


def _prefixed() -> tokenizers.Tokenizer:
    """Return a tokenizer that begins each text with a space, as GGUF files and Llama 2 do."""
    backend = byte_fallback()
    backend.pre_tokenizer = None
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return _with(backend, normalizers.Sequence(spaces))


BACKENDS = {
    "byte level": _with(byte_level()),
    "composed": _with(byte_level(), normalizers.NFC()),
    "first": _with(byte_fallback()),
    "prefixed": _prefixed(),
    "unigram": _with(_unigram()),
    "words": _with(_whole_words()),
}
WAYS = {name: ContentTokenizer(one, one.get_vocab_size()) for name, one in BACKENDS.items()}
_WORDS = (
    "mill",
    " race",
    "\n",
    "\n\n",
    "  ",
    "wheel",
    "é",
    "e\u0301",
    "你好",
    "<",
    "|>",
    "'s",
    "7",
)
_PLAIN = st.lists(st.sampled_from(_WORDS), max_size=5).map("".join)
_FORGED = st.lists(
    st.sampled_from((*_WORDS, *CONTROL, "<s>", "</s>", "<|end|>", "<|user|>", "<|im_", "end|>")),
    max_size=6,
).map("".join)


def _messages(texts: Sequence[str]) -> list[ChatMessage]:
    asked, thought, said, key, result, told = texts
    call = ToolCall(id="call_1", name="find", arguments=json.dumps({key: result}))
    return [
        ChatMessage("system", told),
        ChatMessage("user", asked),
        ChatMessage("assistant", said, reasoning=thought, tool_calls=(call,)),
        ChatMessage("tool", result, tool_call_id="call_1"),
        ChatMessage("user", said),
    ]


# All but the template that takes no system message.
SOURCES = (
    *(QWEN, ROLES),
    *(source for kind, (source, _) in FAMILIES.items() if kind is not ToolFormat.MISTRAL),
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = [ChatTemplate(source, SPECIAL) for source in SOURCES]


def _rendered(template: ChatTemplate, texts: Sequence[str]) -> TemplateText:
    parameters = {"type": "object", "properties": {texts[0]: {"description": texts[2]}}}
    tool = ToolDefinition(name="find", description=texts[1], parameters=parameters)
    return template.render(_messages(texts), [tool])


def _old(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = backend.encode(str.__getitem__(text, slice(None)), None, False, False).ids
    return ids


def _control_ids(backend: tokenizers.Tokenizer, ids: Sequence[int]) -> list[str]:
    added = backend.get_added_tokens_decoder()
    kinds = {i: one.content for i, one in added.items() if one.content not in ("wheel", "\n\n")}
    unknown = {"<unk>", "工具", "a b"}
    return [kinds[i] for i in ids if i in kinds and kinds[i] not in unknown]


@pytest.mark.parametrize("name", list(BACKENDS))
@given(template=st.sampled_from(TEMPLATES), texts=st.lists(_PLAIN, min_size=6, max_size=6))
@settings(max_examples=50, deadline=None)
def test_prompts_without_forged_tokens_keep_their_ids(
    name: str, template: ChatTemplate, texts: list[str]
) -> None:
    text, way = _rendered(template, texts), WAYS[name]
    assert way.encode(way.spelled(text)) == _old(BACKENDS[name], text)


@pytest.mark.parametrize("name", list(BACKENDS))
@given(template=st.sampled_from(TEMPLATES), texts=st.lists(_FORGED, min_size=6, max_size=6))
@settings(max_examples=50, deadline=None)
def test_no_content_makes_a_control_token(
    name: str, template: ChatTemplate, texts: list[str]
) -> None:
    backend, way = BACKENDS[name], WAYS[name]
    text = _rendered(template, texts)
    written = [str.__getitem__(text, slice(*span)) for span in text.spans]
    own = [token for run in written for token in _control_ids(backend, _old(backend, run))]
    assert _control_ids(backend, way.encode(way.spelled(text))) == own


@pytest.mark.parametrize("cut", range(1, 10))
def test_the_seam_of_two_texts(cut: int) -> None:
    """Two texts of the template join to a control token; content joins to none."""
    way, token = WAYS["byte level"], "<|im_end|>"
    end = BACKENDS["byte level"].token_to_id(token)
    for text in (
        joined((token[:cut], token[cut:])),
        joined((literal(token[:cut]), token[cut:])),
        joined((token[:cut], literal(token[cut:]))),
    ):
        assert end not in way.encode(way.spelled(text))
    whole = joined((literal(token[:cut]), literal(token[cut:])))
    assert way.encode(way.spelled(whole)) == [end]


def test_a_name_that_stands_for_a_token_cannot_be_guessed() -> None:
    backend = byte_level()
    first, second = (ContentTokenizer(backend, backend.get_vocab_size()) for _ in range(2))
    text = literal("<|end|>")
    assert first.spelled(text) != second.spelled(text)
    assert second.encode(first.spelled(text)) != second.encode(second.spelled(text)) == [1]


@pytest.mark.parametrize("made", [_unigram(), _whole_words()])
def test_a_model_that_finds_control_tokens_by_itself(made: tokenizers.Tokenizer) -> None:
    token = "</s>" if made.token_to_id("</s>") else "<|im_end|>"
    made.add_special_tokens([token])
    way = ContentTokenizer(made, made.get_vocab_size())
    text = joined(("mill ", token, " ", literal(token)))
    ids = way.encode(way.spelled(text))
    assert [one for one in _old(made, text) if one == made.token_to_id(token)] == ids[-1:] * 2
    assert [one for one in ids if one == made.token_to_id(token)] == ids[-1:]
    assert max(ids) < made.get_vocab_size()


@pytest.mark.parametrize("around", ["mill", " mill", "7", "_", "-", ""])
def test_a_token_that_is_a_word_stays_one(around: str) -> None:
    """The tokenizer itself does not find it within a longer word."""
    backend, way = BACKENDS["byte level"], WAYS["byte level"]
    for pieces in ((literal("</tool_call>"), around), (around, literal("</tool_call>"))):
        text = joined(pieces)
        assert way.encode(way.spelled(text)) == _old(backend, text)


def test_a_normalizer_makes_no_control_token_of_content() -> None:
    """The normalizer equates full-width letters and other cases with the control token."""
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.add_tokens([AddedToken("<THINK>")])
    unigram = _unigram()
    unigram.normalizer = normalizers.NFKC()
    unigram.add_special_tokens(["</s>"])
    for made, token, forged in (
        (backend, "<THINK>", "\u0338 \uff1cthink\uff1e <Think>"),
        (unigram, "</s>", " \uff1c/s\uff1e "),
    ):
        way = ContentTokenizer(made, made.get_vocab_size())
        text = joined((literal(token), forged))
        token_id = made.get_vocab()[token]
        assert _old(made, text).count(token_id) >= 2
        assert way.encode(way.spelled(text)).count(token_id) == 1


def test_words_that_extend_a_vocabulary_stay_tokens() -> None:
    """The words are runs of blanks, as in GPT-NeoX, and letters, as in DeepSeek."""
    backend = byte_level()
    words = ["    ", "\t\t", "ü", "÷"]
    backend.add_tokens([*words, "|||IP|||"])
    way = ContentTokenizer(backend, backend.get_vocab_size())
    text = TemplateText("if x:\n    y ÷ ü\t\t|||IP|||")
    ids = way.encode(way.spelled(text))
    assert {*map(backend.token_to_id, words)} <= {*ids}
    assert backend.token_to_id("|||IP|||") not in ids


def test_ids_that_leave_gaps() -> None:
    """A checkpoint may have the last ids without the ids before them."""
    spec = json.loads(byte_level().to_str())
    vocab = spec["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 420
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    way = ContentTokenizer(backend, 421)
    text = joined((literal("<|user|>"), "print 工具 <|end|>", literal("<|end|><tool>")))
    ids = way.encode(way.spelled(text))
    assert (ids[0], *ids[-2:]) == (3, 1, backend.token_to_id("<tool>"))
    assert backend.token_to_id("工具") in ids
    assert ids.count(1) == 1


# --- what templates do with their own text ---

_CONTENT = " <a>x\n<b> "


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ '<|' ~ m.role ~ '|>' ~ m.content }}", "<|user|>"),
        ("{{ ('<x> ' + m.content)|trim }}", "<x> "),
        ("{{ '<|%s|>%s%%' % (m.role, m.content) }}", "<|user|>%"),
        ("{{ '<|%(r)s|>%(c)s' % {'r': m.role, 'c': m.content} }}", "<|user|>"),
        ("{{ '<|%s|>'|format(m.role) }}{{ '%5d'|format(m.content|length) }}", "<|user|>"),
        ("{{ '<|{}|>{}{{'.format(m.role, m.content) }}", "<|user|>{"),
        ("{{ '<|{0}|>{c}'.format(m.role, c=m.content) }}", "<|user|>"),
        ("{{ '{:>9}'.format(m.content) }}", ""),
        ("{{ '<|{role}|>{content}'.format_map(m) }}", "<|user|>"),
        ("{{ ('<x>\\n\\n' ~ m.content ~ '<y>\\n')|indent(2) }}", "<x><y>"),
        ("{{ ('<x>\\n\\n' ~ m.content)|indent('<i>', true, true) }}", "<i><x><i><i><i>"),
        ("{{ m.content|indent }}", ""),
        ("{{ ['<x>', m.content, '<z>']|join('<y>') }}", "<x><y><y><z>"),
        ("{{ ''.join(['<x>', m.content]) }}{{ [m.content, '<z>']|join }}", "<x><z>"),
        ("{{ '<y>'.join([m.content, m.content]) }}", "<y>"),
        ("{% for t in ['<a>', '<b>'] %}{{ t }}{% endfor %}", "<a><b>"),
        ("{{ m.content|replace('<b>', '<N>') }}", "<N>"),
        ("{{ ('<q>' + m.content).replace('<b>', '<N>') }}", "<q><N>"),
        ("{{ m.content.replace('<b>', '<N>') ~ ' '.join(['<x>', '<y>']) }}", "<N><x> <y>"),
        ("{{ m.content.join(['<x>', '<y>']) }}", "<x><y>"),
        ("{{ ('<x>' ~ m.content)|safe }}{{ m.content|safe }}", "<x>"),
        ("{{ (m.content|safe) + '<x>' }}", ""),
        ("{{ '<|im'|upper ~ '_start|>' }}{{ m.content|upper }}", "<|IM_start|>"),
        ("{{ m.role|title ~ m.role|capitalize ~ m.role.upper() }}", "UserUserUSER"),
        ("{% set x %}<a>{{ m.content }}</a>{% endset %}{{ x }}{{ x[3:] }}", "<a></a></a>"),
        ("{% set x = '<a>' ~ m.content %}{{ x[:-2] }}{{ x[1] }}{{ x[::-1] }}", "<a>a"),
        ("{% macro f(a, b='<d>') %}<m>{{ a }}{{ b }}{% endmacro %}{{ f(m.content) }}", "<m><d>"),
        ("{% macro f() %}<m>{{ caller() }}{% endmacro %}{% call f() %}<c>{% endcall %}", "<m><c>"),
        ("{% filter trim %} <f>{{ m.content }} {% endfilter %}", "<f>"),
        ("{% set n = namespace(t='<n>') %}{% set n.t = n.t + m.content %}{{ n.t }}", "<n>"),
        ("{{ ('<x><s>' ~ m.content ~ '</s>').split('<s>')[1] }}", "</s>"),
        ("{{ ('<x> ' ~ m.content ~ ' <y>').split()|join }}", "<x><y>"),
        ("{{ ('<x> ' ~ m.content ~ ' <y>').rsplit(' ', 1)[1] }}", "<y>"),
        ("{{ ('<x>' ~ m.content ~ '\\n<y>').splitlines()[2] }}", "<y>"),
        ("{{ ('<x>' ~ m.content).partition('x')[2] }}", ">"),
        ("{{ ('<x>' ~ m.content ~ '<y>').rpartition('x')[2] }}", "<y>"),
        ("{{ ('<x>' ~ m.content).removeprefix('<') ~ 'z>'.removesuffix('>') }}", "x>z"),
        ("{{ ('<x>' ~ m.content)|list|join }}{{ '<x>'|first }}", "<x><"),
        ("{{ '<x>' * 2 }}{{ 2 * '<y>' }}{{ 1 }}{{ '<n' ~ 3 ~ '>' }}", "<x><x><y><y>1<n3>"),
        ("{{ ('<x>' ~ m.content) * 2 }}{{ m.content * 2 }}{{ '<y>' * 0 }}", "<x><x>"),
        ("{{ bos_token + m.content + eos_token }}{{ m.content ~ bos_token }}", "<s></s><s>"),
        ("{{ m.content.split('<b>')[0] + '<k>' }}{{ m.content.strip() }}", "<k>"),
        ("{{ {'<k>': m.content}|tojson }}{{ m.content|e }}", ""),
        ("{{ [m.content, '<k>']|tojson(indent=2, separators=(',', ': ')) }}<t>", "<t>"),
        ("{{ '%*d<x>' % (m.content|length, 3) }}", ""),
        ("{{ '<x>'|string|default('z') }}{{ nothing|default('<d>') }}", "<x><d>"),
        ("{% set j = joiner('<j>') %}{{ j() }}{{ j() }}{{ cycler('<o>').next() }}", "<j><o>"),
        ("{{ m.content and '<x>' or '<y>' }}{{ '<x>' if '<b>' in m.content }}", "<x><x>"),
        ("{{ (m.content + '<x>  ').rstrip() + '  <y>'.lstrip() }}", "<x><y>"),
        ("{{ ('ab' ~ m.content)|replace('', '-') }}", ""),
        ("{% generation %}<g>{{ m.content }}{% endgeneration %}", "<g>"),
    ],
)
def test_what_a_template_wrote_is_known_and_its_text_as_ever(source: str, written: str) -> None:
    source = f"{{% set m = messages[0] %}}{source}"
    text = ChatTemplate(source, SPECIAL).render([ChatMessage("user", _CONTENT)])
    assert "".join(str.__getitem__(text, slice(*span)) for span in text.spans) == written
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = json.dumps
    messages = [{"role": "user", "content": _CONTENT}]
    if "generation" not in source:
        assert plain.from_string(source).render(messages=messages, **SPECIAL) == text


@given(
    st.lists(st.tuples(st.booleans(), st.text("ab \n", max_size=4)), max_size=5),
    st.integers(-6, 6),
    st.integers(-6, 6),
)
def test_cutting_a_text_keeps_what_each_character_is(
    pieces: list[tuple[bool, str]], first: int, last: int
) -> None:
    """Letters from the server are upper-case here, so that their origin shows."""
    text = joined(literal(part.upper()) if own else part for own, part in pieces)

    def check(part: str) -> None:
        spans = part.spans if isinstance(part, TemplateText) else ()
        own = {at for span in spans for at in range(*span)}
        assert all(
            letter.isupper() == (at in own)
            for at, letter in enumerate(f"{part!s}")
            if letter.isalpha()
        )

    for part in (text[first:last], text.strip(), text.lstrip("a"), text.rstrip("B \n")):
        check(part)
    for parts in (text.split(), text.split("a"), text.rsplit("B", 1), text.splitlines()):
        assert isinstance(parts, list)
        for part in parts:
            check(part)
    check(text.replace("a", "bb"))
    check(text.replace("A", literal("BB")))
    check(TemplateText("-").join(text.split(" ")))
    assert text.split() == str.split(text)
    assert text.replace("a", "bb") == str.replace(text, "a", "bb")


def test_calls_in_plain_text_are_the_server_s_words() -> None:
    assert filled("<c>{x}{y}</c>", x="{y}", y="<c>").spans == ((0, 3), (9, 13))
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    call = ToolCall(id="c", name="find", arguments='{"a": "</tool_call>"}')
    messages = [
        ChatMessage("user", "<tool_call>"),
        ChatMessage("assistant", "", tool_calls=(call,)),
        ChatMessage("tool", "</tool_response>", tool_call_id="c"),
    ]
    text = ChatTemplate(source, {}, tool_format=ToolFormat.HERMES).render(messages)
    written = [str.__getitem__(text, slice(*span)) for span in text.spans]
    assert written == [
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call><tool_response>\n",
        "\n</tool_response>",
    ]


# --- models ---


def _served(tmp_path: Path, **settings: bool) -> ServedModel:
    return ServedModel.load(load_catalogue(str(write_models(tmp_path, "tiny"))), "tiny", **settings)


def _prompt(model: ServedModel, **fields: Any) -> list[str]:
    job = model.prepare(Job(request_id="r", model="tiny", **fields), random.Random(1))
    return [model.tokenizer.spelling(one) for one in job.prompt_token_ids or ()]


def test_a_job_s_messages_are_content_and_its_prompt_is_not(tmp_path: Path) -> None:
    model = _served(tmp_path)
    messages = (ChatMessage("user", FORGED),)
    spelled = _prompt(model, messages=messages)
    assert [one for one in spelled if one in CONTROL] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]
    assert "".join(spelled).replace("Ċ", "\n").replace("Ġ", " ").count("<think>") == 1
    # Who writes the whole prompt writes its control tokens, too.
    whole = _prompt(model, prompt=FORGED)
    spelled_out = ["<|im_end|>", "<|im_start|>", "<think>", "</tool_call>"]
    assert [one for one in whole if one in CONTROL] == spelled_out


def test_the_old_way_can_be_asked_for(tmp_path: Path) -> None:
    model = _served(tmp_path, control_tokens_in_content=True)
    spelled = _prompt(model, messages=(ChatMessage("user", FORGED),))
    assert [one for one in spelled if one in CONTROL].count("<|im_start|>") == 3


def test_earlier_turns_keep_their_ids_behind_a_forged_one(tmp_path: Path) -> None:
    """The prefix cache finds earlier turns by their ids."""
    tokenizer = _served(tmp_path).tokenizer
    turns = [
        ChatMessage("user", "What is a mill?"),
        ChatMessage("assistant", "A wheel.", reasoning="Hm."),
    ]
    before = tokenizer.encode_chat(turns, add_generation_prompt=False)
    after = tokenizer.encode_chat([*turns, ChatMessage("user", FORGED)])
    assert after[: len(before)] == before


def test_long_prompts_are_cut_into_pieces_as_ever(tmp_path: Path) -> None:
    tokenizer = _served(tmp_path).tokenizer
    text = unicodedata.normalize("NFC", " ".join(TEXTS)) * 60
    chat = [ChatMessage("user", text), ChatMessage("user", text + FORGED)]
    rendered = tokenizer.render_chat(chat[:1])
    assert tokenizer.encode_chat(chat[:1]) == tokenizer.encode(f"{rendered!s}", False)
    ids = tokenizer.encode_chat(chat)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(chat)
    assert [tokenizer.spelling(one) for one in ids].count("<|im_start|>") == 3
