"""From a job's prompts to ids."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from engine import chat as chat_module
from engine.prompts import Prompts
from protocol import ErrorCode, Job, RequestError
from protocol.job import RESERVED
from tests.engine.doubles import case
from tests.models import CHAT_TEMPLATE, FIXTURES, byte_tokenizer

HI = [{"role": "user", "content": "Hi"}]
SHOW_ALL = "{{ messages | tojson }}|{{ tools | tojson }}|{{ extra }}"
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system' }}{% for tool in tools %}"
    "{{ '\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role }}"
    "{% if message.name is defined %}{{ ' ' + message.name }}{% endif %}{{ '\n' }}"
    "{% if message.reasoning_content is defined %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}{{ '<tool_call>' + call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}{{ ' ' + key + '=' + value | tojson }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}"
    "{% if message.tool_call_id is defined %}{{ ' (answers ' + message.tool_call_id + ')' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>' if thinking else '') }}{% endif %}"
)
"""Written as the models' own are that know tools."""


def make(**job: Any) -> Job:
    return Job.model_validate({"id": "job", **job})


def encode(tokenizer: Any, **job: Any) -> list[int]:
    (ids,) = Prompts(tokenizer).encode(make(**job))
    return ids


def rendered(tokenizer: Any, **job: Any) -> str:
    text: str = tokenizer.decode(encode(tokenizer, **job))
    return text


def with_template(tokenizer: Any, template: Any) -> Any:
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.fixture(scope="session")
def prompts(smollm2: Any) -> Prompts:
    """SmolLM2's, with some templates by name."""
    templates = {
        "default": smollm2.chat_template,
        "trims": "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}",
        "splits": "{% for m in messages %}<|im_start|>{{ m.content.split('.') | join(' ') }}<|im_end|>{% endfor %}",
    }
    return Prompts(with_template(smollm2, templates))


def spaced(unigrams: list[str], **scheme: Any) -> Any:
    """A tokenizer that puts a space before a text, as Llama 2's does."""
    pieces = [(piece, -1.0) for piece in ["<unk>", *unigrams]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**scheme)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


# Texts and ids


@pytest.mark.parametrize(
    "row", [row for row in case("C01")["rows"] if "prompt_tokens" in row], ids=lambda row: row["id"]
)
def test_nothing_is_stripped(smollm2: Any, row: dict[str, Any]) -> None:
    assert len(encode(smollm2, prompt=row["prompt"])) == row["prompt_tokens"]


def test_an_empty_text_is_no_tokens(smollm2: Any) -> None:
    assert encode(smollm2, prompt="") == []


def test_several_prompts_come_back_in_order(smollm2: Any) -> None:
    prompts = Prompts(smollm2)
    assert prompts.encode(make(prompt=["Hi", "", "there"])) == [
        smollm2.encode("Hi"),
        [],
        smollm2.encode("there"),
    ]
    assert prompts.encode(make(prompt=[[5, 0, 49151], [7]])) == [[5, 0, 49151], [7]]
    assert prompts.encode(make(prompt=[5, 6])) == [[5, 6]]
    assert prompts.encode(make(prompt=["5"])) == [smollm2.encode("5")]


def adds_bos(tokenizer: Any) -> Any:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_bos_is_written_once() -> None:
    tokenizer = adds_bos(byte_tokenizer(512))
    body = encode(tokenizer, prompt="a", add_special_tokens=False)
    assert encode(tokenizer, prompt="a") == encode(tokenizer, prompt="<s>a") == [1, *body]
    chat = encode(tokenizer, messages=[{"role": "user", "content": "a"}])
    assert chat[:1] == [1]
    assert chat[1] != 1


def test_bos_that_the_user_wrote_stays() -> None:
    plain, adding = byte_tokenizer(512), adds_bos(byte_tokenizer(512))
    (a,) = encode(plain, prompt="a")
    assert encode(plain, prompt="<s><s>a") == [1, 1, a]  # this tokenizer adds none
    assert encode(adding, prompt="<s><s>a") == [1, 1, a]
    assert encode(adding, prompt="<s><s>a", add_special_tokens=False) == [1, 1, a]


def test_special_text_in_a_prompt_is_text_where_asked(smollm2: Any) -> None:
    text = "a<|im_end|>b"
    assert 2 in encode(smollm2, prompt=text)
    ids = encode(smollm2, prompt=text, split_special_tokens=True)
    assert 2 not in ids
    assert smollm2.decode(ids) == text
    assert 2 in encode(smollm2, prompt=text)  # the option does not stick to the tokenizer
    adding = adds_bos(byte_tokenizer(512))
    assert encode(adding, prompt="<s>", split_special_tokens=True)[:2] == [
        1,
        *encode(adding, prompt="<", add_special_tokens=False),
    ]


# Barred words


def test_a_word_is_barred_as_it_stands_and_after_a_space(smollm2: Any) -> None:
    words = Prompts(smollm2).words
    rows = case("B12")["rows"]
    assert words(rows[0]["bad_words"]) == [(smollm2.convert_tokens_to_ids("Paris"),), (7042,)]
    assert words(rows[1]["bad_words"]) == [(74, 25089), (1777, 25089)]
    assert words(["Paris", "ZORK", "Paris"]) == [*words(["Paris"]), *words(["ZORK"])]
    assert words([]) == []


def test_a_word_within_a_text_is_barred_where_texts_begin_with_a_space() -> None:
    tokenizer = adds_bos(spaced(["▁", "the", "▁the", "\n"], split=False))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the")) == ["<s>", "▁the"]
    forms = [tokenizer.convert_ids_to_tokens(form) for form in Prompts(tokenizer).words(["the"])]
    assert ["▁the"] in forms
    assert ["the"] in forms


def test_a_word_that_is_no_token_is_refused() -> None:
    tokenizer = spaced(["a"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("!", "")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(RequestError, match=r"bad_words\[1\]: '!!' is no token") as caught:
        Prompts(tokenizer).words(["a", "!!"])
    assert caught.value.code == ErrorCode.INVALID_REQUEST


# Chats

REFUSED = [row for row in case("C06")["rows"] if "expect" in row]
TAKEN = [row for row in case("C06")["rows"] if "prompt" in row]


@pytest.mark.parametrize("row", TAKEN, ids=range(len(TAKEN)))
def test_a_chat_is_rendered_exactly(smollm2: Any, row: dict[str, Any]) -> None:
    assert rendered(smollm2, messages=row["messages"]) == row["prompt"]


@pytest.mark.parametrize("row", REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_chat_does_not_get_past_the_border(row: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        make(messages=row["messages"])


def test_tools_calls_and_their_answers_reach_the_template(smollm2: Any) -> None:
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
    }
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "é"}'}}
    messages = [
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": t} for t in ("2", "+2?")]},
        {"role": "assistant", "content": None, "reasoning_content": "easy", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    job = {"messages": messages, "tools": [tool], "chat_template": TOOLS_TEMPLATE}
    turns = (
        "<|im_start|>system\nadd(a, b)<|im_end|>\n"
        "<|im_start|>user Ann\n2+2?<|im_end|>\n"
        '<|im_start|>assistant\n<think>easy</think><tool_call>add a=2 b="é"</tool_call><|im_end|>\n'
        "<|im_start|>tool\n4 (answers c1)<|im_end|>\n"
    )
    assert rendered(smollm2, **job) == turns + "<|im_start|>assistant\n"
    assert rendered(smollm2, **job, add_generation_prompt=False) == turns
    thinking = rendered(smollm2, **job, chat_template_kwargs={"thinking": True})
    assert thinking == turns + "<|im_start|>assistant\n<think>"
    assert call["function"]["arguments"] == '{"a": 2, "b": "é"}', "the caller's own is left as it was"


@pytest.mark.parametrize("arguments", ["", "[1]", "not JSON", "3", {"a": 1}, "[" * 100_000])
def test_arguments_that_are_no_object_are_handed_on_as_they_came(smollm2: Any, arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert rendered(smollm2, messages=messages, chat_template=template) == str(arguments)


def test_fields_that_are_not_set_are_not_defined(smollm2: Any) -> None:
    template = "{{ messages[0].keys() | join(',') }}|{{ tools is none }}|{{ messages[0].name is defined }}"
    assert rendered(smollm2, messages=HI, chat_template=template) == "role,content|True|False"


def test_variables_cannot_take_the_place_of_what_a_job_has_fields_for(smollm2: Any) -> None:
    arguments = set(inspect.signature(smollm2.apply_chat_template).parameters) - {"kwargs", "documents"}
    assert arguments <= RESERVED
    for name in RESERVED:
        with pytest.raises(pydantic.ValidationError, match=rf"chat_template_kwargs: {name} cannot be set"):
            make(messages=HI, chat_template_kwargs={name: 1})
    variables = {"documents": [{"title": "T", "text": "x"}], "bos_token": "B"}
    template = "{{ documents[0].title }}{{ bos_token }}{{ eos_token }}"
    assert rendered(smollm2, messages=HI, chat_template=template, chat_template_kwargs=variables) == (
        "TB<|im_end|>"
    )


def test_the_last_message_is_gone_on_from(smollm2: Any) -> None:
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    text = rendered(smollm2, messages=messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    assert rendered(smollm2, messages=messages).endswith("Once upon<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_of_the_job_takes_the_place_of_the_models(smollm2: Any) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}!"
    assert rendered(smollm2, messages=HI, chat_template=template) == "<|im_start|>Hi!"
    bare = with_template(smollm2, None)
    assert rendered(bare, messages=HI, chat_template=template) == "<|im_start|>Hi!"
    several = with_template(smollm2, {"default": "one", "tool_use": "two", "other": "three"})
    assert rendered(several, messages=HI) == "one"
    assert rendered(several, messages=HI, tools=[{"type": "function"}]) == "two"
    assert rendered(several, messages=HI, chat_template="other") == "three"


def test_without_a_chat_template_only_text_is_taken(smollm2: Any) -> None:
    bare = with_template(smollm2, None)
    refused, taken = case("C05")["a"]["rows"]
    with pytest.raises(RequestError, match="no chat template") as caught:
        encode(bare, messages=refused["messages"])
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    assert encode(bare, prompt=taken["prompt"]) == smollm2.encode(taken["prompt"])


@pytest.mark.parametrize("row", case("C05")["b"]["rows"], ids=range(3))
def test_what_the_template_says_is_passed_on(smollm2: Any, row: dict[str, Any]) -> None:
    strict = with_template(smollm2, (FIXTURES / "template_nosystem.jinja").read_text())
    if row["expect"] == "ok":
        assert rendered(strict, messages=row["messages"]) == (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        return
    quoted = row["expect"].split('"')[1]
    with pytest.raises(RequestError, match=quoted) as caught:
        encode(strict, messages=row["messages"])
    assert caught.value.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[9]['content'] + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ raise_exception('two\nlines') }}",
        "{% include 'elsewhere' %}",
        "{{ messages.append(1) }}",
    ],
    ids=["undefined", "arithmetic", "escape", "recursion", "range", "lines", "include", "change"],
)
@pytest.mark.parametrize("whose", ["the model's", "the job's"])
def test_a_template_that_fails_in_any_way_is_an_error_of_the_row(
    smollm2: Any, template: str, whose: str
) -> None:
    owner = with_template(smollm2, template if whose == "the model's" else None)
    given = {} if whose == "the model's" else {"chat_template": template}
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: [^\n]+$"):
        encode(owner, messages=HI, **given)


@pytest.mark.parametrize(
    "template", ["a\n{% if %}", "\n{{ messages", "\n{% unknown %}", "\n{{ 1 | no_filter }}"]
)
def test_a_template_that_is_none_is_told_apart_from_one_that_refuses(smollm2: Any, template: str) -> None:
    with pytest.raises(RequestError, match=r"^chat_template is no valid template: line 2: [^\n]+$"):
        encode(smollm2, messages=HI, chat_template=template)
    with pytest.raises(
        RequestError, match=r"^the model's chat template is no valid template: line 2: [^\n]+$"
    ):
        encode(with_template(smollm2, template), messages=HI)


@pytest.mark.parametrize(
    "body",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
    ids=["silent", "writing", "macros"],
)
def test_a_template_of_a_job_does_not_run_for_ever(
    smollm2: Any, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "TEMPLATE_SECONDS", 0.1)
    with pytest.raises(RequestError, match=r"ran for more than 0\.1 s"):
        encode(smollm2, messages=HI, chat_template=body)
    assert rendered(smollm2, messages=HI, chat_template="{{ messages[0].content }}") == "Hi"


def test_what_a_template_writes_has_a_bound(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MAX_CHARACTERS", 100)
    assert len(rendered(smollm2, messages=HI, chat_template="{{ 'x' * 100 }}")) == 100
    with pytest.raises(RequestError, match=r"wrote 101 characters, at most 100"):
        encode(smollm2, messages=HI, chat_template="{{ 'x' * 101 }}")


# What is no Unicode


def test_nul_is_kept(smollm2: Any) -> None:
    assert "<|im_start|>user\na\0b<|im_end|>" in rendered(
        smollm2, messages=[{"role": "user", "content": "a\0b"}]
    )


@pytest.mark.parametrize(
    ("job", "place"),
    [
        ({"prompt": "ab\ud83d"}, "prompt: .*character 2"),
        ({"prompt": ["ok", "\ud83d"]}, r"prompt\[1\]: .*character 0"),
        ({"messages": [{"role": "user", "content": "a\udc00"}]}, r"messages\.0\.content: .*character 1"),
        ({"messages": [{"role": "user", "content": "", "name": "\ud83d"}]}, r"messages\.0\.name: "),
        (
            {"messages": HI, "tools": [{"function": {"name": "f", "description": "é\ud83d"}}]},
            r"tools\.0\.function\.description: .*character 1",
        ),
        ({"messages": HI, "tools": [{"\ud83d": 1}]}, r"tools\.0: a key: "),
        ({"messages": HI, "chat_template_kwargs": {"extra": "\ud83d"}}, r"chat_template_kwargs\.extra: "),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a": "\\ud83d"}'}}]}
                ]
            },
            r"messages\.0\.tool_calls\.0\.function\.arguments\.a: .*character 0",
        ),
        ({"messages": HI, "chat_template": "{{ '\\ud83d' }}"}, "the rendered chat: .*character 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_half_a_surrogate_pair_is_refused_with_its_place(smollm2: Any, job: Any, place: str) -> None:
    with pytest.raises(RequestError, match=place) as caught:
        encode(with_template(smollm2, SHOW_ALL), **job)
    assert caught.value.code == ErrorCode.INVALID_REQUEST


# Special tokens that the user spelled out


def test_special_text_in_a_chat_is_text_where_asked(smollm2: Any, prompts: Prompts) -> None:
    c08 = case("C08")
    for option, counts in ((False, c08["as_transformers_does"]), (True, c08["with_content_as_text"])):
        (ids,) = prompts.encode(make(messages=c08["messages"], split_special_tokens=option))
        assert (ids.count(1), ids.count(2)) == (counts["n_id1"], counts["n_id2"])
        assert smollm2.decode(ids) == smollm2.apply_chat_template(
            c08["messages"], add_generation_prompt=True, tokenize=False
        )


def test_special_text_is_text_wherever_the_user_wrote_it(smollm2: Any, prompts: Prompts) -> None:
    end = "<|im_end|>"
    call = {"function": {"name": end, "arguments": '{"<|im_end|>": 1}'}}
    job = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": half} for half in ("<|im_", "end|>")]},
            {"role": "user", "content": "", "name": end},
            {"role": "assistant", "tool_calls": [call]},
        ],
        "tools": [{end: {"description": [end]}}],
        "chat_template": "<|im_start|>" + SHOW_ALL + end,
        "chat_template_kwargs": {"extra": end},
    }
    (ids,) = prompts.encode(make(**job, split_special_tokens=True))
    assert [token_id for token_id in ids if token_id in smollm2.all_special_ids] == [1, 2]
    assert smollm2.decode(ids) == rendered(smollm2, **job)
    assert smollm2.decode(ids).count(end) == 8


def test_without_special_text_the_option_changes_nothing(prompts: Prompts) -> None:
    messages = [{"role": "user", "content": "Plain <|im_ text\U00100000 of all kinds 日本 "}]
    usual = prompts.encode(make(messages=messages))
    assert prompts.encode(make(messages=messages, split_special_tokens=True)) == usual


SPECIAL_TEXTS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>"]
PIECES = [
    *SPECIAL_TEXTS,
    "<|im_",
    "end|>",
    "<",
    "|>",
    " ",
    "\n",
    ".",
    "a",
    "日本",
    "\U00100000",
    "\U00100001",
]
CHARACTERS = st.characters(
    exclude_categories=["Cs", "Cc"]
)  # SmolLM2 has no token for some control characters
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(CHARACTERS, max_size=4), max_size=8).map("".join)
QUICK = settings(max_examples=40, deadline=None)


@QUICK
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3), template=st.sampled_from(["default", "trims", "splits"])
)
def test_only_the_templates_own_tokens_are_special(
    smollm2: Any, prompts: Prompts, texts: list[str], template: str
) -> None:
    chat = {"chat_template": template, "split_special_tokens": True}
    messages = [{"role": "user", "content": text} for text in texts]
    (ids,) = prompts.encode(make(messages=messages, **chat))
    (own,) = prompts.encode(make(messages=[{"role": "user", "content": "x"} for _ in texts], **chat))
    special = set(smollm2.all_special_ids)
    assert [i for i in ids if i in special] == [i for i in own if i in special]
    # Beside the usual reading, not the text itself: SmolLM2 has no token for some bytes and leaves them out.
    (usual,) = prompts.encode(make(messages=messages, chat_template=template))
    assert smollm2.decode(ids) == smollm2.decode(usual)


@pytest.fixture(scope="session")
def bytewise() -> Prompts:
    return Prompts(byte_tokenizer(512))


@QUICK
@given(text=TEXTS)
def test_ids_are_those_of_a_template_read_by_hand(bytewise: Prompts, text: str) -> None:
    def plain(content: str) -> list[int]:
        (ids,) = bytewise.encode(make(prompt=content, split_special_tokens=True))
        assert len(ids) == len(content.encode())
        return ids

    assert bytewise._tokenizer.chat_template == CHAT_TEMPLATE
    by_hand = [1, *plain("user: " + text), 2, 1, *plain("assistant: ")]
    job = make(messages=[{"role": "user", "content": text}], split_special_tokens=True)
    assert bytewise.encode(job) == [by_hand]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_tokenizer_that_begins_texts_with_a_space_reads_the_whole(scheme: str) -> None:
    tokenizer = spaced(["▁", "a", "▁a", "<", "/", "s", ">", "b"], prepend_scheme=scheme, split=False)
    tokenizer.chat_template = "a<s>a{{ messages[0].content }}</s>a"
    usual = encode(tokenizer, messages=[{"role": "user", "content": "b"}])
    split = encode(tokenizer, messages=[{"role": "user", "content": "b</s>b"}], split_special_tokens=True)
    middle = tokenizer.convert_tokens_to_ids(["<", "/", "s", ">", "b"])
    (b,) = tokenizer.convert_tokens_to_ids(["b"])
    cut = usual.index(b) + 1
    assert split == usual[:cut] + middle + usual[cut:]


def test_a_tokenizer_that_finds_the_special_token_all_the_same_says_so() -> None:
    tokenizer = spaced(["</s>", "a", "▁"], split=False)
    tokenizer.chat_template = "{{ messages[0].content }}"
    for job in ({"prompt": "a</s>"}, {"messages": [{"role": "user", "content": "a</s>"}]}):
        with pytest.raises(RequestError, match=r"split_special_tokens: .* '</s>' as plain text") as caught:
            encode(tokenizer, **job, split_special_tokens=True)
        assert caught.value.code == ErrorCode.INVALID_REQUEST
    assert encode(tokenizer, prompt="a", split_special_tokens=True) == encode(tokenizer, prompt="a")


def test_a_tokenizer_in_python_says_that_it_cannot(smollm2: Any) -> None:
    class Slow(type(smollm2)):  # type: ignore[misc]
        is_fast = False

    slow = copy.copy(smollm2)
    slow.__class__ = Slow
    with pytest.raises(RequestError, match="split_special_tokens"):
        encode(slow, messages=[{"role": "user", "content": "<|im_end|>"}], split_special_tokens=True)


def test_threads_share_one_tokenizer(prompts: Prompts) -> None:
    texts = [f"{'word ' * (index % 7)}<|im_end|>{index}" for index in range(120)]
    kinds: list[Callable[[str], Job]] = [
        lambda text: make(prompt=text),
        lambda text: make(prompt=text, split_special_tokens=True),
        lambda text: make(messages=[{"role": "user", "content": text}], split_special_tokens=True),
    ]
    jobs = [kinds[index % 3](text) for index, text in enumerate(texts)]
    one_by_one = list(map(prompts.encode, jobs))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(prompts.encode, jobs)) == one_by_one
