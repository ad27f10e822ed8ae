"""The tokenizer of a GGUF file as a Hugging Face `tokenizer.json` and `tokenizer_config.json`, from its metadata.

It encodes and decodes as transformers does with the file itself (`AutoTokenizer.from_pretrained(…, gguf_file=…)`),
which decides what the metadata do not state; `tokenizers.toml` has the rules, and decision 061 the reasons. What
transformers and llama.cpp read differently is said in a note. Where they disagree about the whole text, or a rule is
missing, no tokenizer is made, and the reason is stated.

Metadata that contradict themselves are errors: token numbers beyond the vocabulary, merges of what is no token, lists
of another length or type. A checkpoint whose tokenizer is stated with `--assets` is not read for one.

The inverse is here too: the metadata of a tokenizer, from its `tokenizer.json` and `tokenizer_config.json`. Byte-level
BPE and SentencePiece's BPE are written; the splits and pre-tokenizers are those of `tokenizers.toml`. The scores of
SentencePiece's tokens are made of the order of the merges, which must be one that scores can state. What the metadata
have no words for (tokens that take the spaces around them, another post-processor) is refused by name. llama.cpp never
composes letters (NFC), and its own converter leaves that out of a file, too: a note says so. Numbers between the tokens
and the rows of the embedding get tokens of the type `unused`, as llama.cpp's converter does.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from wherry.core.json_document import parse_json
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import LARGE, beyond, exceeds, scale_limit
from wherry.core.units import plural
from wherry.cures import Argument, Cure
from wherry.errors import CorruptError, UnrepresentableError, UsageError, describe_exception
from wherry.formats.format import ModelFiles
from wherry.integrations.formats.gguf.header import (
    GgufHeader,
    StoredList,
    StoredText,
    read_numbers,
    read_text,
    read_texts,
)
from wherry.store.location import MOST_CONFIG, Location

START, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_RULES = Path(__file__).with_name("tokenizers.toml")
BYTES, PIECES, NONE = "gpt2", "llama", "none"  # values of `model`: byte-level BPE, SentencePiece, nothing
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
_READ = {"model", "pre", "tokens", "token_type", "scores", "merges", *_FLAGS}
_FALSE = ("remove_extra_whitespaces", "add_sep_token")  # metadata that only these values leave without effect
MOST_TOKENS, _MOST_MERGES = 1 << 20, 1 << 20
_LONGEST_TOKEN, _LONGEST_MERGE = 1 << 10, 1 << 12
_MOST_TOKEN_TEXT, _MOST_MERGE_TEXT, _LONGEST_TEMPLATE = 8 << 20, 32 << 20, 1 << 20
SPACE = "▁"


class _NotMadeError(Exception):
    """Why no tokenizer is made."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The vocabulary that the metadata state, after it was checked.

    Attributes:
        model: `gpt2` or `llama`.
        architecture: of the model.
        pre: the name of the splits; empty if none is stated.
        tokens: by their numbers; all are different.
        kinds: the type of each token.
        numbers: token → its number.
        special: name of a special token → the token.
        flags: add_bos_token, add_eos_token and add_space_prefix, as far as they are stated.
    """

    model: str
    architecture: str
    pre: str
    tokens: Sequence[str]
    kinds: Sequence[int]
    numbers: Mapping[str, int]
    special: Mapping[str, str]
    flags: Mapping[str, bool]


def tokenizer_files(header: GgufHeader, rows: int | None) -> ModelFiles:
    """The files of the tokenizer that the metadata state.

    Args:
        header: of the file; of several, of the first one.
        rows: of the embedding; None if it is unknown.

    Returns:
        The files, and notes: what transformers reads differently from llama.cpp, or why there are no files.

    Raises:
        CorruptError: the metadata contradict themselves, or have values of another type.
        HostileError: they exceed a limit.
    """
    if f"{START}model" not in header.metadata and f"{START}model" not in header.stored:
        return ModelFiles()
    if header.metadata.get(f"{START}model") == NONE:
        return ModelFiles()
    try:
        return _files(header, rows)
    except _NotMadeError as reason:
        return ModelFiles(missing=f"no tokenizer is made from the metadata, because {reason}")
    except CorruptError as error:
        raise CorruptError(
            error.what,
            uri=header.location.uri,
            cure=Cure(
                "pass the folder of the model's own tokenizer with {}, or download the file again",
                Argument("assets"),
            ),
        ) from error


def _files(header: GgufHeader, rows: int | None) -> ModelFiles:
    _require_known(header)
    words = _vocabulary(header, rows)
    merges = _merges(header, words)
    document = _byte_level(words) if words.model == BYTES else _sentence_piece(words)
    template = _template(header)
    config = {
        **{name: words.special.get(name) for name in IDS},
        "add_bos_token": _begins(words), "add_eos_token": _ends(words),
        **({"chat_template": template} if template is not None else {}),
        "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": list(_added_tokens(words)),
        "normalizer": document["normalizer"], "pre_tokenizer": document["pre_tokenizer"],
        "post_processor": _post_processor(words), "decoder": document["decoder"],
        "model": {
            "type": "BPE", "dropout": None, **document["model"], "ignore_merges": False, "vocab": words.numbers,
            "merges": merges,
        },
    }  # fmt: skip
    files = {
        "tokenizer.json": (json.dumps(whole, ensure_ascii=False) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    return ModelFiles(files, notes=tuple(_notes(header, words, merges)))


@cache
def rules() -> Mapping[str, Any]:
    """The tables of `tokenizers.toml`."""
    return tomllib.loads(_RULES.read_text(encoding="utf-8"))


def _require_known(header: GgufHeader) -> None:
    """Every value that the metadata have of a tokenizer is read, or has no influence on it."""
    known = _READ | {f"{name}_token_id" for name in IDS.values()} | set(rules()["neutral"])
    for key in (*header.metadata, *header.left):
        name = key.removeprefix(START)
        if key.startswith(TEMPLATE) or not key.startswith("tokenizer.") or name in known:
            continue
        if name not in _FALSE or header.metadata.get(key) is not False:
            raise _NotMadeError(f"{key} is not read")


def _vocabulary(header: GgufHeader, rows: int | None) -> _Vocabulary:
    model, pre = _text(header, "model"), _text(header, "pre")
    if model not in (BYTES, PIECES):
        raise _NotMadeError(f"its kind, {model}, is none of {BYTES} and {PIECES}")
    tokens = _texts(header, "tokens", MOST_TOKENS, _LONGEST_TOKEN, _MOST_TOKEN_TEXT)
    if not tokens or "" in tokens:
        raise _NotMadeError("it has a token without text")
    if rows is not None and len(tokens) > rows:
        raise _corrupt("tokens", f"{plural(len(tokens), 'token')}, but the embedding has {rows} rows")
    kinds = _numbers(header, "token_type", len(tokens))
    if kinds is None:
        raise _NotMadeError(f"{START}token_type does not say which tokens are special")
    if not all(type(one) is int and 0 <= one <= BYTE for one in kinds):
        raise _corrupt("token_type", f"types of tokens that are no numbers from 0 to {BYTE}")
    architecture = str(header.metadata.get("general.architecture", ""))
    spelled = tokens
    if rules()["pieces"].get(architecture) == "no-prefix" and model == PIECES:
        spelled = [SPACE * len(one) if one.isspace() and " " in one else one for one in tokens]
        kinds = [
            NORMAL if new != old else kind for new, old, kind in zip(spelled, tokens, kinds, strict=True)
        ]
    numbers = {one: number for number, one in enumerate(spelled)}
    if len(numbers) != len(tokens):
        raise _corrupt("tokens", "a token more than once")
    special = _special(header, spelled)
    return _Vocabulary(model, architecture, pre, spelled, kinds, numbers, special, _flags(header))


def _special(header: GgufHeader, tokens: Sequence[str]) -> dict[str, str]:
    """The special tokens whose numbers are stated, by their names."""
    found: dict[str, str] = {}
    for name, word in IDS.items():
        key = f"{word}_token_id"
        number = header.metadata.get(f"{START}{key}")
        if number is None and f"{START}{key}" not in header.stored:
            continue
        if type(number) is not int or not 0 <= number < len(tokens):
            shown = "a list or text" if number is None else number
            raise _corrupt(key, f"{shown!r}, which is the number of none of {plural(len(tokens), 'token')}")
        found[name] = tokens[number]
    return found


def _flags(header: GgufHeader) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for name in _FLAGS:
        value = header.metadata.get(f"{START}{name}")
        if value is None and f"{START}{name}" not in header.stored:
            continue
        if not isinstance(value, bool):
            raise _corrupt(name, "a value that is neither true nor false")
        found[name] = value
    return found


def _begins(words: _Vocabulary) -> bool:
    """Whether a text begins with a token; SentencePiece's does by default."""
    return "bos_token" in words.special and words.flags.get("add_bos_token", words.model == PIECES)


def _ends(words: _Vocabulary) -> bool:
    return "eos_token" in words.special and words.flags.get("add_eos_token", False)


def _merges(header: GgufHeader, words: _Vocabulary) -> list[tuple[str, str]]:
    """The merges that the metadata state, or those that the scores of SentencePiece's tokens mean."""
    stated = _texts(header, "merges", _MOST_MERGES, _LONGEST_MERGE, _MOST_MERGE_TEXT)
    if stated is None and words.model == BYTES:
        raise _corrupt("merges", "no merges of a byte-level vocabulary")
    if stated is None:
        return _merges_of_scores(header, words)
    merges: list[tuple[str, str]] = []
    for one in stated:
        left, space, right = one.partition(" ")
        if not (left and space and right) or " " in right:
            raise _corrupt("merges", f"a merge {one[:80]!r} that is not of two tokens")
        if not (left in words.numbers and right in words.numbers and left + right in words.numbers):
            raise _corrupt("merges", f"a merge {one[:80]!r} of what is no token")
        merges.append((left, right))
    return merges


def _merges_of_scores(header: GgufHeader, words: _Vocabulary) -> list[tuple[str, str]]:
    """See `ways_to_make`; of Gemma's tokens the first is the best, as transformers does."""
    scores = _numbers(header, "scores", len(words.tokens))
    if scores is None:
        raise _NotMadeError(f"{START}scores does not say which tokens are made first")
    if rules()["pieces"].get(words.architecture) == "no-prefix":
        scores = range(0, -len(words.tokens), -1)
    if any(score != score for score in scores):  # noqa: PLR0124  not a number
        raise _corrupt("scores", "scores that are not numbers")
    return ways_to_make(words.tokens, scores)


def ways_to_make(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Each way to make a token of two, the token with the largest score first.

    Ways of equal tokens follow in the order of the lengths of their parts, the longer left part first.
    """
    numbers = {token: number for number, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        own = [
            (score, cut, len(token) - cut, token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in numbers and token[cut:] in numbers
        ]
        own.sort(key=lambda row: (numbers[row[3]], numbers[row[4]]))
        found += own
    found.sort(key=lambda row: row[:3], reverse=True)
    return [(left, right) for _score, _left, _right, left, right in found]


def _byte_level(words: _Vocabulary) -> dict[str, Any]:
    """The parts of a tokenizer whose tokens spell bytes."""
    known = rules()
    split = known["pre"].get(words.pre)
    if split is None:
        raise _NotMadeError(f"the pre-tokenizer {words.pre or 'that is not stated'} is not known")
    if split not in known["only"].get(words.architecture, [split]):
        raise _NotMadeError(
            f"transformers splits the text of {words.architecture} in another way than {words.pre}"
        )
    if words.flags.get("add_space_prefix"):
        raise _NotMadeError(f"{START}add_space_prefix is true, which transformers does not read")
    alphabet = _alphabet()
    raw = next((one for one in words.tokens if not alphabet.issuperset(one)), None)
    if raw is not None:
        raise _NotMadeError(f"the token {raw[:80]!r} is not spelled in bytes; transformers does not read it")
    pattern = known["splits"][split]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not pattern}
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, level]} if pattern else level,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "continuing_subword_prefix": "", "end_of_word_suffix": "", "unk_token": None, "fuse_unk": False,
            "byte_fallback": False,
        },
    }  # fmt: skip


@cache
def _alphabet() -> frozenset[str]:
    """The characters that spell bytes: printable ones themselves, the others from 256 on, as in GPT-2."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return frozenset(chr(one) for one in (*printable, *range(0x100, 0x100 + 256 - len(printable))))


def _sentence_piece(words: _Vocabulary) -> dict[str, Any]:
    """The parts of a tokenizer of SentencePiece's pieces, in which spaces are spelled."""
    shape = rules()["pieces"].get(words.architecture)
    if shape is None:
        raise _NotMadeError(f"transformers does not read SentencePiece's tokens of {words.architecture}")
    prefixed = shape != "no-prefix"
    if words.flags.get("add_space_prefix", prefixed) is not prefixed:
        stated = str(words.flags["add_space_prefix"]).lower()
        raise _NotMadeError(f"{START}add_space_prefix is {stated}, which transformers does not read")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizer, cut = {
        "metaspace": (
            None, {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False},
        ),
        "prepended": (
            {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}, None,
        ),
        "no-prefix": (
            spaces,
            {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        ),
    }[shape]  # fmt: skip
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []),
    ]  # fmt: skip
    return {
        "normalizer": normalizer,
        "pre_tokenizer": cut,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "unk_token": None if prefixed else words.special.get("unk_token"), "fuse_unk": True, "byte_fallback": True,
        },
    }  # fmt: skip


def _added_tokens(words: _Vocabulary) -> Iterator[dict[str, Any]]:
    """Tokens that are found in a text before it is split: control tokens, and those that users defined."""
    special = set(words.special.values())
    for number, (token, kind) in enumerate(zip(words.tokens, words.kinds, strict=True)):
        is_special = kind == CONTROL or token in special
        if is_special or kind == USER_DEFINED:
            yield {
                "id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": is_special,
            }  # fmt: skip


def _post_processor(words: _Vocabulary) -> dict[str, Any]:
    """The tokens around a text."""
    first = [words.special["bos_token"]] if _begins(words) else []
    last = [words.special["eos_token"]] if _ends(words) else []

    def around(name: str, part: int) -> list[dict[str, Any]]:
        return [
            *({"SpecialToken": {"id": one, "type_id": part}} for one in first),
            {"Sequence": {"id": name, "type_id": part}},
            *({"SpecialToken": {"id": one, "type_id": part}} for one in last),
        ]

    used = {one: {"id": one, "ids": [words.numbers[one]], "tokens": [one]} for one in (*first, *last)}
    return {
        "type": "TemplateProcessing", "single": around("A", 0), "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": used,
    }  # fmt: skip


def _template(header: GgufHeader) -> str | None:
    if TEMPLATE in header.metadata:
        value = header.metadata[TEMPLATE]
        if not isinstance(value, str):
            raise CorruptError(f"invalid GGUF: {TEMPLATE} is no text")
        return value
    stored = header.stored.get(TEMPLATE)
    if isinstance(stored, StoredText):
        return read_text(header, stored, _LONGEST_TEMPLATE)
    if TEMPLATE in header.stored:
        raise CorruptError(f"invalid GGUF: {TEMPLATE} is no text")
    return None


def _notes(header: GgufHeader, words: _Vocabulary, merges: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What transformers reads differently from llama.cpp, and what is not carried."""
    cure = Cure(
        "if the model was trained otherwise, pass the folder of its own tokenizer with {}", Argument("assets")
    )
    if words.pre in rules()["begin"]["token"] and words.model == BYTES:
        if "add_bos_token" not in words.flags:
            yield (
                f"{START}add_bos_token is not stated: texts begin without a token, as transformers reads the file; "
                f"llama.cpp begins them with one; {cure}"
            )
        made = {left + right for left, right in merges}
        whole = [
            one for one, kind in zip(words.tokens, words.kinds, strict=True)
            if len(one) > 1 and kind not in (UNKNOWN, CONTROL, USER_DEFINED) and one not in made
        ]  # fmt: skip
        if whole:
            yield (
                f"no merges make {plural(len(whole), 'token')}, such as {whole[0][:80]!r}: transformers does not use "
                f"them; llama.cpp takes a word that is one whole; {cure}"
            )
    others = [one for one in (*header.metadata, *header.left) if one.startswith(TEMPLATE) and one != TEMPLATE]
    if others:
        yield f"of the chat templates only the first is carried, not {', '.join(others)}"


def _text(header: GgufHeader, name: str) -> str:
    value = header.metadata.get(f"{START}{name}", "")
    if not isinstance(value, str) or f"{START}{name}" in header.stored:
        raise _corrupt(name, "a value that is no short text")
    return value


def _texts(header: GgufHeader, name: str, count: int, longest: int, most: int) -> list[str] | None:
    stored = _list(header, name, count)
    return None if stored is None else read_texts(header, stored, longest, most)


def _numbers(header: GgufHeader, name: str, count: int) -> Sequence[Any] | None:
    stored = _list(header, name, MOST_TOKENS)
    if stored is None:
        return None
    if stored.length != count:
        raise _corrupt(name, f"{plural(stored.length, 'value')} of {plural(count, 'token')}")
    return read_numbers(header, stored)


def _list(header: GgufHeader, name: str, most: int) -> StoredList | None:
    key = f"{START}{name}"
    stored = header.stored.get(key)
    if isinstance(stored, StoredList):
        if exceeds(stored.length, most):
            raise beyond(key, scale_limit(most), "entries", uri=header.location.uri)
        return stored
    if key in header.stored or key in header.metadata:
        raise _corrupt(name, "a value that is no list of texts or numbers")
    return None


def _corrupt(name: str, what: str) -> CorruptError:
    return CorruptError(f"invalid GGUF: {START}{name} has {what}")


TOKENIZER, CONFIG, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FILES = (TOKENIZER, CONFIG, TEMPLATE_FILE)
_MOST = 128 << 20
_CURE = Cure(
    "pass another tokenizer with {}, or leave it out with {}",
    Argument("assets"),
    Argument("set", "tokenizer=none"),
)
_COMPOSES = {"type": "NFC"}
_NOT_COMPOSED = (
    "the tokenizer composes letters first (NFC), and llama.cpp does not: it makes other tokens of text whose accents "
    "are characters of their own; compose such text before"
)
_SPACES_AFTER_SPECIAL = (
    "the tokenizer puts a space before the first text only, if it begins with none, and llama.cpp before every text, "
    "also one that follows a special token: such prompts become other tokens"
)
_WRITTEN_FLAGS = ("single_word", "lstrip", "rstrip")
_Pair = tuple[str, str]


def read_json(place: Location) -> dict[str, Any]:
    """A JSON table.

    Raises:
        CorruptError: it is not JSON.
        UsageError: it is no table.
    """
    most = _MOST if place.name == TOKENIZER else MOST_CONFIG
    found = parse_json(place.read_whole(most), place.name, uri=place.uri, limits=LARGE)
    if not isinstance(found, dict):
        raise UsageError(f"{place.name} is no table", uri=place.uri, cure="restore the file of the model")
    return found


class StatedTokenizer(NamedTuple):
    """The metadata of a GGUF file that describe a tokenizer.

    Attributes:
        metadata: by key.
        notes: what llama.cpp does otherwise than the tokenizer.
    """

    metadata: dict[str, Any]
    notes: tuple[str, ...] = ()


def tokenizer_metadata(
    companion: Callable[[str], Location | None], config: Mapping[str, Any], rows: int
) -> StatedTokenizer:
    """The metadata of a GGUF file that describe the tokenizer.

    Args:
        companion: where the files are, by name.
        config: of the model, which may state numbers of special tokens.
        rows: of the embedding.

    Raises:
        UnrepresentableError: the metadata cannot state this tokenizer.
        UsageError: a file cannot be read.
    """
    place, config_place, template = (companion(name) for name in FILES)
    assert place is not None, "a target without a tokenizer is refused before"
    document = read_json(place)
    own = read_json(config_place) if config_place is not None else {}
    text = template.read_whole(MOST_CONFIG) if template is not None else None
    try:
        return _metadata(document, own, text, config, rows)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _refusal(
            f"{TOKENIZER} is not of the form of the tokenizers library ({describe_exception(error)})"
        ) from error


def _metadata(
    document: Mapping[str, Any],
    own: Mapping[str, Any],
    text: bytes | None,
    config: Mapping[str, Any],
    rows: int,
) -> StatedTokenizer:
    model = document.get("model", {})
    if model.get("type") != "BPE":
        raise _refusal(f"its model is {model.get('type')}, not BPE")
    pieces = bool(model.get("byte_fallback"))
    merges = [_merge(one) for one in model.get("merges", ())]
    vocabulary = {str(token): int(number) for token, number in model.get("vocab", {}).items()}
    tokens, kinds = _tokens(document, vocabulary, rows)
    if pieces:
        unknown = model.get("unk_token") or _text_of(own.get("unk_token"))
        spaces = document.get("normalizer") == _SPELL
        kinds = [
            _kind_of_piece(token, kind, unknown, spaces=spaces)
            for token, kind in zip(tokens, kinds, strict=True)
        ]
    numbers = {token: number for number, token in enumerate(tokens)}
    begins, ends = _around(document, own)
    template = _written_template(own) if text is None else text.decode()
    stated = (_pieces if pieces else _bytes)(document, tokens, kinds, merges)
    metadata = {
        **{f"{START}{key}": value for key, value in stated.items()},
        f"{START}tokens": tokens,
        f"{START}token_type": kinds,
        **token_ids(own, numbers, config),
        f"{START}add_bos_token": begins,
        f"{START}add_eos_token": ends,
        **({TEMPLATE: template} if template is not None else {}),
    }
    only_first = (document.get("pre_tokenizer") or {}).get("prepend_scheme") == "first"
    composes = not pieces and bool(document.get("normalizer"))
    notes = {_NOT_COMPOSED: composes, _SPACES_AFTER_SPECIAL: pieces and only_first}
    return StatedTokenizer(metadata, tuple(note for note, applies in notes.items() if applies))


def without_tokens(config: Mapping[str, Any]) -> StatedTokenizer:
    """The metadata of a file without a tokenizer, which llama.cpp loads too."""
    return StatedTokenizer({f"{START}model": NONE, **token_ids({}, {}, config)})


def token_ids(
    own: Mapping[str, Any], numbers: Mapping[str, int], config: Mapping[str, Any]
) -> dict[str, int]:
    """The numbers of special tokens, as the tokenizer names them, else as the model's config states them.

    Raises:
        UnrepresentableError: they contradict each other, or a token has no number.
    """
    found: dict[str, int] = {}
    for name, key in IDS.items():
        stated, token = config.get(f"{name}_id"), _text_of(own.get(name))
        if token is not None and token not in numbers:
            raise _refusal(f"{name} {token!r} is none of its tokens")
        number = numbers[token] if token is not None else stated
        if type(stated) is int and number != stated:
            raise _refusal(
                f"{CONFIG} states the {name} {token!r}, number {number}, and the model's config {stated}"
            )
        if type(number) is int and number >= 0:
            found[f"{START}{key}_token_id"] = number
    return found


def _refusal(reason: str) -> UnrepresentableError:
    return UnrepresentableError(
        f"the metadata of a GGUF file cannot state the tokenizer: {reason}", cure=_CURE
    )


def _text_of(token: Any) -> str | None:
    """A token that is stated by itself or with its flags."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str | None):
        raise TypeError("a special token")
    return text


def _merge(stated: Any) -> _Pair:
    left, _, right = stated.partition(" ") if isinstance(stated, str) else (stated[0], "", stated[1])
    if " " in left or " " in right:
        raise _refusal(f"a merge of {left!r} and {right!r}, which have spaces")
    return left, right


def _tokens(
    document: Mapping[str, Any], vocabulary: Mapping[str, int], rows: int
) -> tuple[list[str], list[int]]:
    """The tokens by their numbers, and the type of each."""
    by_number = {number: token for token, number in vocabulary.items()}
    kinds: dict[int, int] = {}
    for one in document.get("added_tokens", ()):
        flags = [flag for flag in _WRITTEN_FLAGS if one.get(flag)]
        flags += ["normalized"] if one.get("normalized") and document.get("normalizer") else []
        if flags:
            raise _refusal(f"the added token {one['content']!r} is {flags[0]}")
        by_number[one["id"]] = one["content"]
        kinds[one["id"]] = CONTROL if one.get("special") else USER_DEFINED
    odd = [number for number in by_number if not (type(number) is int and 0 <= number < rows)]
    if odd:
        raise _refusal(f"it has a token number {odd[0]}, and the embedding {rows} rows")
    if rows > MOST_TOKENS:
        raise _refusal(f"the embedding has {rows} rows, more than {MOST_TOKENS}")
    tokens = [by_number.get(number, f"[PAD{number}]") for number in range(rows)]
    if len(set(tokens)) != rows:
        raise _refusal("two of its tokens have the same text")
    return tokens, [kinds.get(number, NORMAL if number in by_number else UNUSED) for number in range(rows)]


def _kind_of_piece(token: str, kind: int, unknown: str | None, *, spaces: bool) -> int:
    """The type of one of SentencePiece's tokens: bytes are spelled `<0x0A>`.

    Args:
        token: the token.
        kind: its type by the list of added tokens.
        unknown: the token for what has none.
        spaces: whether merges make added tokens of spelled spaces: Gemma's, which no text has as they are spelled.
    """
    if token == unknown:
        return UNKNOWN
    if spaces and kind == USER_DEFINED and not token.strip(SPACE):
        return NORMAL
    return BYTE if len(token) == len("<0x0A>") and token.startswith("<0x") and token.endswith(">") else kind


def _bytes(
    document: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[_Pair]
) -> dict[str, Any]:
    """A byte-level vocabulary: the name of its splits, and its merges."""
    normalizer = document.get("normalizer")
    if normalizer and normalizer != _COMPOSES:
        raise _refusal(f"it has the normaliser {normalizer.get('type')}")
    split = _split(document.get("pre_tokenizer") or {})
    pre = next((name for name, one in rules()["pre"].items() if one == split), None)
    if split is None or pre is None:
        raise _refusal("its pre-tokenizer is none that llama.cpp has a name for")
    whole = pre in rules()["begin"]["token"]
    if whole is not bool(document["model"].get("ignore_merges")):
        made = {left + right for left, right in merges}
        pairs = zip(tokens, kinds, strict=True)
        alone = next(
            (token for token, kind in pairs if kind == NORMAL and len(token) > 1 and token not in made), None
        )
        if alone is not None:
            raise _refusal(
                f"llama.cpp takes words that are tokens whole{'' if whole else ' not'}, such as {alone!r}"
            )
    return {"model": BYTES, "pre": pre, "merges": [f"{left} {right}" for left, right in merges]}


def _split(stated: Mapping[str, Any]) -> str | None:
    """The name of the expression by which a byte-level tokenizer splits text; None if it is another one."""
    parts = stated.get("pretokenizers", [stated])
    level = parts[-1]
    if level.get("type") != "ByteLevel" or level.get("add_prefix_space"):
        return None
    if len(parts) == 1:
        return "gpt-2" if level.get("use_regex", True) else None
    first = parts[0]
    known = first.get("type") == "Split" and first.get("behavior") == "Isolated" and not first.get("invert")
    if len(parts) != 2 or not known or level.get("use_regex", True):  # noqa: PLR2004  a split and a level
        return None
    pattern = first["pattern"].get("Regex")
    return next((name for name, one in rules()["splits"].items() if one == pattern), None)


def _pieces(
    document: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[_Pair]
) -> dict[str, Any]:
    """SentencePiece's vocabulary: its scores, of which the merges are made again."""
    prefixed = _is_prefixed(document)
    if prefixed is None:
        raise _refusal("it does not spell spaces as SentencePiece does")
    rank = {
        token: number for number, token in enumerate(dict.fromkeys(left + right for left, right in merges))
    }
    scores = [
        -float(rank.get(token, len(rank) + number)) if kind == NORMAL else 0.0
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    ]
    again = ways_to_make(tokens, scores)
    order = [left + right for left, right in merges]
    if order != [left + right for left, right in again] or set(again) != set(merges):
        raise _refusal("no scores of its tokens mean its merges")
    stated = {"model": PIECES, "pre": "default", "scores": scores}
    return stated if prefixed else {**stated, "add_space_prefix": False}


_SPELL = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_CUT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def _is_prefixed(document: Mapping[str, Any]) -> bool | None:
    """Whether a text gets a space before it; None if spaces are not spelled, by a normaliser or by Metaspace."""
    normalizer, cut = document.get("normalizer"), document.get("pre_tokenizer") or {}
    if normalizer is None:
        kind = cut.get("type"), cut.get("replacement"), cut.get("split", True)
        spelled = kind == ("Metaspace", SPACE, False) and cut.get("prepend_scheme") in ("first", "always")
        return True if spelled else None
    if normalizer == _SPELL and cut in ({}, _CUT):  # Gemma's, whose cut finds no space that is left
        return False
    prefix = {"type": "Prepend", "prepend": SPACE}
    return True if not cut and normalizer.get("normalizers") == [prefix, _SPELL] else None


def _around(document: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a text begins, and ends, with a token."""
    stated = document.get("post_processor")
    processors = stated.get("processors", [stated]) if stated else ()
    templates = [one for one in processors if one.get("type") != "ByteLevel"]
    single = templates[0].get("single", []) if len(templates) == 1 else []
    if len(templates) > 1 or (templates and templates[0].get("type") != "TemplateProcessing"):
        raise _refusal(f"it has the post-processor {templates[0].get('type')}")
    words = [part["SpecialToken"]["id"] if "SpecialToken" in part else None for part in single]
    bos, eos = (_text_of(own.get(name)) for name in ("bos_token", "eos_token"))
    begins, ends = bool(words) and words[0] is not None, bool(words) and words[-1] is not None
    if words not in ([], [*([bos] if begins else []), None, *([eos] if ends else [])]):
        raise _refusal("its post-processor puts other tokens around a text than the first and the last one")
    for name, found in (("add_bos_token", begins), ("add_eos_token", ends)):
        if own.get(name, found) not in (None, found):
            raise _refusal(f"{CONFIG} states {name} = {own[name]}, and the post-processor does otherwise")
    return begins, ends


def _written_template(own: Mapping[str, Any]) -> str | None:
    """The chat template of a tokenizer's config; of several the default one."""
    stated = own.get("chat_template")
    if isinstance(stated, list):
        stated = {one["name"]: one["template"] for one in stated}.get("default")
    if not isinstance(stated, str | None):
        raise TypeError("chat_template")
    return stated
