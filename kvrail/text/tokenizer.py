"""A model's tokenizer, read from its files without torch or transformers; ids equal transformers' AutoTokenizer's."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from kvrail.errors import ConfigError, ContextLengthError, InvalidRequestError
from kvrail.text.bounds import longest_text
from kvrail.text.chat import ChatTemplate
from kvrail.text.decoding import METASPACE, TokenDecoder, read_decoder
from kvrail.text.files import TokenizerFiles, read_files, resolve_folder

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back.

    backend: the `tokenizers` object. decoder: gives the bytes of a token. chat: the model's chat templates. vocab_size:
    length of the model's logits; ids that only pad it have no text. eos_token_ids: ids that end a sequence.
    longest_text: the most characters that one token stands for, None where there is no bound. kind: the name of its
    class in transformers.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        decoder: TokenDecoder,
        chat: ChatTemplate,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        longest_text: int | None,
        kind: str = "",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat = chat
        self._kind = kind
        self.longest_text = longest_text
        self._bytes: dict[int, bytes] = {}
        self.decoder = decoder
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also those the model wants around a text, such as bos.

        Other threads run meanwhile. Raises ContextLengthError where there are more than `most` ids, InvalidRequestError
        where the text is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has half a surrogate pair at character {error.start}; send valid Unicode"
            ) from error
        if most is not None:
            self.refuse_longer(text, most)
        # `encode` would hold the interpreter's lock; and offsets, which only the other of the two has, are not needed.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(encoding) > most:
            raise ContextLengthError(f"{most} tokens are the most, and the text has {len(encoding)}; shorten it")
        return list(encoding.ids)

    def refuse_longer(self, text: str, most: int) -> None:
        """Raise ContextLengthError where the length of `text` alone says that it has more than `most` ids."""
        if self.longest_text and len(text) > most * self.longest_text:
            raise ContextLengthError(
                f"{most} tokens are the most, and no text of {len(text)} characters has so few; shorten it"
            )

    def token_id(self, token: str) -> int | None:
        """Id of a token by its own name, such as `<|im_end|>`; None where there is none."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def token(self, token_id: int) -> str:
        """A token's own name, as the vocabulary has it; empty for an id that has none."""
        return str(self._backend.id_to_token(token_id) or "")

    def special_id(self, text: str) -> int | None:
        """Id of the special token whose text this is exactly; None where there is none."""
        found = self.token_id(text)
        return found if found in self.special_ids else None

    def describe(self) -> dict[str, Any]:
        """Describes the tokenizer under the names of tokenizer_config.json, without paths."""
        added = {}
        for token_id, token in sorted(self._backend.get_added_tokens_decoder().items()):
            flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
            added[str(token_id)] = {name: getattr(token, name) for name in flags}
        named = {name: self.chat.variables.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return {
            "tokenizer_class": self._kind,
            "vocab_size": self.vocab_size,
            "chat_template": self.chat.source,
            **named,
            "added_tokens_decoder": added,
        }

    def to_json(self, end: int) -> str:
        """The tokenizer as a file tokenizer.json would hold it, with its added tokens below the id `end`."""
        text = str(self._backend.to_str())
        if max(self._backend.get_added_tokens_decoder(), default=0) < end:
            return text
        found = json.loads(text)
        return json.dumps({**found, "added_tokens": [each for each in found["added_tokens"] if each["id"] < end]})

    def has_token(self, token_id: int) -> bool:
        """Whether the id has a token; ids that only pad the model's logits have none."""
        return self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for inside a text; maybe part of a character. Empty for a padding id."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id)
            data = b"" if token is None else self.decoder.to_bytes(token)
            self._bytes[token_id] = data
        return data

    def first_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for at the very start of a text."""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self.decoder.first_to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """Return a token alone as text, leading space included; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence. Other threads run meanwhile."""
        (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)


def load_tokenizer(model: str) -> Tokenizer:
    """Load the tokenizer of `model`, a local folder or a Hub name; ConfigError names the file and the fault."""
    files = read_files(resolve_folder(model))
    try:
        backend = tokenizers.Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    except Exception as error:  # the Rust library raises Exception itself
        raise ConfigError(
            f"{files.folder / 'tokenizer.json'} cannot be read by tokenizers {tokenizers.__version__} ({error}); "
            "upgrade tokenizers or save the tokenizer again"
        ) from error
    named = _named_tokens(files)
    decoder_section = files.tokenizer.get("decoder")
    if _is_rebuilt_llama(files):
        decoder_section = _rebuild_llama(backend, files)
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | named
    _add_tokens(backend, files, named)
    return Tokenizer(
        backend=backend,
        decoder=read_decoder(decoder_section),
        chat=ChatTemplate(files.chat_templates, named),
        vocab_size=_vocab_size(backend, files),
        eos_token_ids=_eos_token_ids(backend, files, named),
        longest_text=longest_text(backend, files.tokenizer.get("model", {})),
        kind=str(files.tokenizer_config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
    )


def _content(token: object) -> str:
    """Return the text of a token that a configuration gives as a string or as a serialised AddedToken."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _named_tokens(files: TokenizerFiles) -> dict[str, str]:
    """bos_token, eos_token … by name. The special tokens map, their older place, is read without added tokens."""
    source = files.tokenizer_config
    if "added_tokens_decoder" not in source:
        source = source | files.special_tokens_map
    return {
        key: _content(value)
        for key, value in source.items()
        if value is not None and (key in NAMED_TOKENS or (key.endswith("_token") and isinstance(value, (str, dict))))
    }


def _add_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles, named: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json knows beyond tokenizer.json, or knows with other flags."""
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    configured = files.tokenizer_config.get("added_tokens_decoder", {})
    missing = []
    for _, fields in sorted(configured.items(), key=lambda item: int(item[0])):
        token = AddedToken(**{key: value for key, value in fields.items() if key != "__type"})
        if repr(token) not in present:
            missing.append(token)
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | {t.content for t in missing}
    extra = files.tokenizer_config.get("extra_special_tokens") or files.tokenizer_config.get(
        "additional_special_tokens"
    )
    if isinstance(extra, dict):
        extra = list(extra.values())
    for content in [*named.values(), *(_content(token) for token in extra or [])]:
        if content not in known:
            known.add(content)
            missing.append(AddedToken(content, special=True))
    special = set(named.values())
    for token in missing:
        if token.content in special:
            token.special = True
    backend.add_tokens(missing)


def _is_rebuilt_llama(files: TokenizerFiles) -> bool:
    """Whether transformers takes only vocabulary and merges from tokenizer.json and rebuilds the rest.

    It does so for `LlamaTokenizer` on model type llama (transformers 5, models/llama/tokenization_llama.py), unless the
    tokenizer is byte-level. The two differ in the spaces behind special tokens.
    """
    name = files.tokenizer_config.get("tokenizer_class") or files.config.get("tokenizer_class") or ""
    byte_level = any("'ByteLevel'" in repr(files.tokenizer.get(key)) for key in ("pre_tokenizer", "decoder"))
    return (
        name.removesuffix("Fast") == "LlamaTokenizer" and files.config.get("model_type") == "llama" and not byte_level
    )


def _rebuild_llama(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> dict[str, Any]:
    """Give `backend` the normaliser, pre-tokenizer and decoder of LlamaTokenizer; returns the decoder's section."""
    prefix = files.tokenizer_config.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = ("always" if files.tokenizer_config.get("legacy", False) else "first") if prefix else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(METASPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence(steps)
    section: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return section


def _vocab_size(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> int:
    """Length of the model's logits where config.json has it, else one past the highest token id."""
    configured = files.text_config.get("vocab_size")
    if isinstance(configured, int):
        return configured
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def _eos_token_ids(backend: tokenizers.Tokenizer, files: TokenizerFiles, named: Mapping[str, str]) -> frozenset[int]:
    """Return the generation configuration's, else the model configuration's, and the tokenizer's own."""
    configured = files.generation_config.get("eos_token_id", files.text_config.get("eos_token_id"))
    ids = set(configured if isinstance(configured, list) else [] if configured is None else [configured])
    own = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return frozenset(ids if own is None else ids | {own})
