"""The tokenizer against transformers' AutoTokenizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvrail.errors import ConfigError, InvalidRequestError
from kvrail.text import load_tokenizer
from tests.chats import chat_ids

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two spaces, then\n\n\ttabs ",
    "naïve café — Größe 你好 🎉 👩‍👩‍👧 e\u0301",
    "<s>[INST] hi [/INST] there</s> more",
    "<|im_start|>user\nx<|im_end|>\n<think>y</think><|eot_id|> z <|begin_of_text|>",
    "I'll print(add(1, 23456789)) they've",
    "\x00\x7f\u200b\ufffd ▁ <0xE2>",
]
TOOLS = [
    {"type": "function", "function": {"name": "get<x>", "description": "é & 'q'", "parameters": {"b": 1, "a": []}}}
]
CHATS = [
    [{"role": "user", "content": "Hi  there "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "né 🎉?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "<s>c"},
    ],
]
CHAT_WITH_TOOLS = [
    {"role": "system", "content": "sys"},
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"z": 1, "é": [1, 2]}}}],
    },
    {"role": "tool", "content": "42", "tool_call_id": "1"},
]


@pytest.fixture(scope="session")
def oracle(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_transformers(folder: Path, oracle, text: str, add_special_tokens: bool) -> None:
    ids = load_tokenizer(str(folder)).encode(text, add_special_tokens)
    assert ids == oracle(text, add_special_tokens=add_special_tokens)["input_ids"]


def test_ids_and_text_of_random_unicode_equal_transformers(folder: Path, oracle) -> None:
    tokenizer = load_tokenizer(str(folder))

    @settings(max_examples=60)
    @given(st.text(), st.lists(st.integers(0, tokenizer.vocab_size - 1)), st.booleans())
    def check(text: str, ids: list[int], skip: bool) -> None:
        assert tokenizer.encode(text, True) == oracle(text)["input_ids"]
        assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)

    check()


def test_special_tokens_equal_transformers(folder: Path, oracle) -> None:
    tokenizer = load_tokenizer(str(folder))
    specials = {token_id for token_id, token in oracle.added_tokens_decoder.items() if token.special}
    assert tokenizer.special_ids == specials
    assert tokenizer.eos_token_ids >= {oracle.eos_token_id}
    assert tokenizer.vocab_size >= len(oracle)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals_transformers(folder: Path, oracle, chat: list, add_generation_prompt: bool) -> None:
    if oracle.chat_template is None:
        pytest.skip("this tokenizer has no template")
    expected = oracle.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, return_dict=False)
    ids = chat_ids(load_tokenizer(str(folder)), chat, add_generation_prompt=add_generation_prompt)
    assert ids == expected


@pytest.mark.parametrize("name", ["qwen", "llama2"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_chat_with_tools_equals_transformers(folders: dict[str, Path], name: str, kwargs: dict) -> None:
    oracle = AutoTokenizer.from_pretrained(folders[name])
    tokenizer = load_tokenizer(str(folders[name]))
    for tools in (TOOLS, []):
        expected = oracle.apply_chat_template(
            CHAT_WITH_TOOLS, tools=tools, add_generation_prompt=True, return_dict=False, **kwargs
        )
        assert chat_ids(tokenizer, CHAT_WITH_TOOLS, tools=tools, **kwargs) == expected


@pytest.mark.parametrize("final", ["The answer", "spaces behind  ", [{"type": "text", "text": "in a part "}]])
@pytest.mark.parametrize("name", ["qwen", "llama3", "llama2"])
def test_continued_message_equals_transformers(folders: dict[str, Path], name: str, final: object) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": final}]
    oracle = AutoTokenizer.from_pretrained(folders[name])
    tokenizer = load_tokenizer(str(folders[name]))
    options = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        expected = oracle.apply_chat_template(chat, return_dict=False, **options)
    except Exception:  # noqa: BLE001 (whatever transformers raises, ours must refuse too)
        with pytest.raises(InvalidRequestError):
            chat_ids(tokenizer, chat, **options)
        return
    assert chat_ids(tokenizer, chat, **options) == expected


def test_no_double_bos(folders: dict[str, Path]) -> None:
    for name in ("llama3", "llama2"):
        tokenizer = load_tokenizer(str(folders[name]))
        bos = tokenizer.encode("", True)
        assert len(bos) == 1
        assert chat_ids(tokenizer, CHATS[0]).count(bos[0]) == 1


def test_template_refusals_name_the_parameter(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(folders["mistral"]))
    cases = [
        ([{"role": "assistant", "content": "first"}], {}, "roles must alternate", "messages"),
        ([{"role": "user", "content": 5}], {}, "refuses these messages", "messages"),
        ([], {}, "at least one", "messages"),
        (CHATS[0], {"continue_final_message": True}, "exclude each other", "continue_final_message"),
        (CHATS[0], {"chat_template": "{% if %}"}, "Expected an expression", "chat_template"),
    ]
    for chat, kwargs, words, param in cases:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            chat_ids(tokenizer, chat, **kwargs)
        assert caught.value.param == param
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        chat_ids(load_tokenizer(str(folders["gemma"])), CHATS[0])


def test_template_runs_in_a_sandbox(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders["gemma"] / name).read_bytes())
    for source in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        (tmp_path / "chat_template.jinja").write_text(source)
        with pytest.raises(InvalidRequestError, match="refuses"):
            chat_ids(load_tokenizer(str(tmp_path)), CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        load_tokenizer(str(tmp_path))


def test_missing_or_broken_files_name_the_remedy(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing.*save_pretrained"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="not a folder"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="neither a folder nor a Hub name"):
        load_tokenizer("no/such/name/at/all")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
    content = json.loads((folders["gemma"] / "tokenizer.json").read_text())
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"decoder": decoder}))
        with pytest.raises(ConfigError, match="decoder"):
            load_tokenizer(str(tmp_path))


def test_hub_name_fetches_no_weights(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(folders["qwen"])

    monkeypatch.setattr("kvrail.text.files.snapshot_download", snapshot)
    load_tokenizer("owner/name")
    assert not any("safetensors" in pattern or pattern == "*" for pattern in asked["owner/name"])


def test_end_of_sequence_ids(folders: dict[str, Path]) -> None:
    llama3 = load_tokenizer(str(folders["llama3"]))
    names = AutoTokenizer.from_pretrained(folders["llama3"])
    assert llama3.eos_token_ids == set(names.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"]))
    qwen = load_tokenizer(str(folders["qwen"]))
    assert qwen.eos_token_ids == {3, AutoTokenizer.from_pretrained(folders["qwen"]).eos_token_id}
    assert llama3.vocab_size == 640


def test_bytes_and_text_of_tokens(folders: dict[str, Path]) -> None:
    for name in ("llama3", "llama2", "mistral"):
        tokenizer = load_tokenizer(str(folders[name]))
        ids = tokenizer.encode("the dog 🎉é", False)
        data = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert data.removeprefix(b" ") == "the dog 🎉é".encode()
        broken = [token_id for token_id in ids if not tokenizer.token_bytes(token_id).isascii()]
        assert any("\ufffd" in tokenizer.token_text(token_id) for token_id in broken)
        assert " dog" in [tokenizer.token_text(token_id) for token_id in ids]
        assert tokenizer.token_bytes(10**6) == b"" and not tokenizer.has_token(10**6)


def test_half_a_surrogate_pair_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        load_tokenizer(str(folders["qwen"])).encode("a\ud83d", True)


def test_no_torch_is_imported() -> None:
    code = "import sys, kvrail.text, kvrail.runtime.logs; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
