"""Small tokenizers of the two families, saved as model folders, and chat templates as models ship them."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "def add(a, b):\n    return a + b  # héllo wörld naïve café\n\n\n\tprint(add(1, 23456))",
    "Größe, Straße, über; Привет мир, как дела? 你好,世界。これはテストです。 🎉🎊 emoji 👩‍👩‍👧",
    "I'll say they've won; we're sure it's 100% true... <tag> [INST] {json: true} </tag>",
] * 4
SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'tool' and loop.index0 == 0 %}
        {{- raise_exception('a conversation cannot begin with a tool') }}
    {%- endif %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson(indent=2) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def byte_level(specials: list[str], normalizer: normalizers.Normalizer | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([special(text) for text in specials])
    return tokenizer


def sentencepiece(decoder_strip: bool = True) -> Tokenizer:
    """BPE over pieces with "▁" for spaces; bytes without a piece fall back to <0xNN>."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+"), "isolated")
    latin = [text for text in CORPUS if text.isascii()]
    trained.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=400))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if decoder_strip:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([special(text) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, tokenizer_config: dict, config: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def build_llama3(folder: Path) -> Path:
    tokenizer = byte_level(
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], None
    )
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A $B",
                special_tokens=[(bos, tokenizer.token_to_id(bos))],
            ),
        ]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "chat_template": LLAMA3,
        "clean_up_tokenization_spaces": True,
    }
    save(folder, tokenizer, config, {"model_type": "llama", "vocab_size": 640, "eos_token_id": 1})
    end = [tokenizer.token_to_id(text) for text in ("<|end_of_text|>", "<|eot_id|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return folder


def build_qwen(folder: Path) -> Path:
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC())
    added = {
        str(token_id): {"content": token.content, "special": True, "normalized": False, "lstrip": False,
                        "rstrip": False, "single_word": False}
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }  # fmt: skip
    free = max(tokenizer.get_vocab().values()) + 1
    added[str(free)] = {"content": "<think>", "special": False, "normalized": False, "lstrip": False,
                        "rstrip": False, "single_word": False}  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
    }
    save(folder, tokenizer, config, {"model_type": "qwen3", "eos_token_id": 3})
    (folder / "chat_template.jinja").write_text(QWEN)
    return folder


def build_llama2(folder: Path, **extra: object) -> Path:
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False,
                      "rstrip": False, "single_word": False},
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": [{"name": "default", "template": LLAMA2}, {"name": "tool_use", "template": QWEN}],
        **extra,
    }  # fmt: skip
    return save(folder, sentencepiece(), config, {"model_type": "llama", "eos_token_id": 2})


def build_mistral(folder: Path) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": LLAMA2}
    save(folder, sentencepiece(), config, {"model_type": "mistral", "eos_token_id": [2]})
    tokens = {"bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False,
                            "single_word": False}, "eos_token": "</s>", "unk_token": "<unk>"}  # fmt: skip
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    return folder


def build_gemma(folder: Path) -> Path:
    """SentencePiece without the space in front and without bos from the post-processor."""
    tokenizer = sentencepiece(decoder_strip=False)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    return save(folder, tokenizer, config)


def build_metaspace(folder: Path) -> Path:
    tokenizer = sentencepiece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    return save(folder, tokenizer, config)


BUILDERS = {
    "llama3": build_llama3,
    "qwen": build_qwen,
    "llama2": build_llama2,
    "llama2-legacy": lambda folder: build_llama2(folder, legacy=True),
    "llama2-no-prefix": lambda folder: build_llama2(folder, add_prefix_space=False),
    "mistral": build_mistral,
    "gemma": build_gemma,
    "metaspace": build_metaspace,
}
DEMO = Path(__file__).resolve().parents[2] / "models" / "kvrail-demo"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    built = {name: build(root / name) for name, build in BUILDERS.items()}
    return built | ({"demo": DEMO} if (DEMO / "tokenizer.json").is_file() else {})


@pytest.fixture(scope="session", params=[*BUILDERS, *(["demo"] if (DEMO / "tokenizer.json").is_file() else [])])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]
