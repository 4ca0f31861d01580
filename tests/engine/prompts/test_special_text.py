"""Special tokens that the user spelled out are text where asked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prompts import Prompts
from protocol import ErrorCode, Job, RequestError
from tests.engine.doubles import case
from tests.engine.prompts.making import SHOW_ALL, encode, make, rendered, spaced
from tests.models import CHAT_TEMPLATE, byte_tokenizer


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
