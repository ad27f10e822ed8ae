"""The metadata of a tokenizer, from its `tokenizer.json` and `tokenizer_config.json`: the inverse of `tokenizer.py`.

Byte-level BPE and SentencePiece's BPE are written; the splits and pre-tokenizers are those of `tokenizers.toml`. The
scores of SentencePiece's tokens are made of the order of the merges, which must be one that scores can state. What the
metadata have no words for (normalisers, tokens that take the spaces around them, another post-processor) is refused by
name. Numbers between the tokens and the rows of the embedding get tokens of the type `unused`, as llama.cpp's converter
does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.errors import UnrepresentableError, UsageError, describe_exception
from wherry.integrations.formats.gguf.tokenizer import (
    BYTE,
    BYTES,
    CONTROL,
    IDS,
    MOST_TOKENS,
    NORMAL,
    PIECES,
    SPACE,
    START,
    TEMPLATE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    rules,
    ways_to_make,
)
from wherry.storage.location import MOST_CONFIG
from wherry.text.json_document import parse_json
from wherry.text.limits import LARGE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wherry.storage.location import Location

TOKENIZER, CONFIG, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FILES = (TOKENIZER, CONFIG, TEMPLATE_FILE)
_MOST = 128 << 20
_CURE = "pass another tokenizer with --assets, or leave it out with --set tokenizer=none"
_FLAGS = ("single_word", "lstrip", "rstrip")
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


def tokenizer_metadata(
    companion: Callable[[str], Location | None], config: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """What a GGUF file states of the tokenizer.

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
) -> dict[str, Any]:
    model = document.get("model", {})
    if model.get("type") != "BPE":
        raise _refusal(f"its model is {model.get('type')}, not BPE")
    pieces = bool(model.get("byte_fallback"))
    merges = [_merge(one) for one in model.get("merges", ())]
    vocabulary = {str(token): int(number) for token, number in model.get("vocab", {}).items()}
    tokens, kinds = _tokens(document, vocabulary, rows)
    if pieces:
        unknown = model.get("unk_token") or _text_of(own.get("unk_token"))
        kinds = [_kind_of_piece(token, kind, unknown) for token, kind in zip(tokens, kinds, strict=True)]
    numbers = {token: number for number, token in enumerate(tokens)}
    begins, ends = _around(document, own)
    template = _template(own) if text is None else text.decode()
    stated = (_pieces if pieces else _bytes)(document, tokens, kinds, merges)
    return {
        **{f"{START}{key}": value for key, value in stated.items()},
        f"{START}tokens": tokens,
        f"{START}token_type": kinds,
        **token_ids(own, numbers, config),
        f"{START}add_bos_token": begins,
        f"{START}add_eos_token": ends,
        **({TEMPLATE: template} if template is not None else {}),
    }


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
        flags = [flag for flag in _FLAGS if one.get(flag)]
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


def _kind_of_piece(token: str, kind: int, unknown: str | None) -> int:
    """The type of one of SentencePiece's tokens: bytes are spelled `<0x0A>`."""
    if token == unknown:
        return UNKNOWN
    return BYTE if len(token) == len("<0x0A>") and token.startswith("<0x") and token.endswith(">") else kind


def _bytes(
    document: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[_Pair]
) -> dict[str, Any]:
    """A byte-level vocabulary: the name of its splits, and its merges."""
    if document.get("normalizer"):
        raise _refusal(f"it has the normaliser {document['normalizer'].get('type')}")
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
    if not _spells_spaces(document):
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
    return {"model": PIECES, "pre": "default", "scores": scores}


def _spells_spaces(document: Mapping[str, Any]) -> bool:
    """Whether a text gets a space before it, and spaces are spelled: by a normaliser, or by Metaspace."""
    normalizer, cut = document.get("normalizer"), document.get("pre_tokenizer") or {}
    if normalizer is None:
        kind = cut.get("type"), cut.get("replacement"), cut.get("split", True)
        return kind == ("Metaspace", SPACE, False) and cut.get("prepend_scheme") in ("first", "always")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = {"type": "Prepend", "prepend": SPACE}
    return not cut and normalizer.get("normalizers") == [prefix, spaces]


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


def _template(own: Mapping[str, Any]) -> str | None:
    """The chat template of a tokenizer's config; of several the default one."""
    stated = own.get("chat_template")
    if isinstance(stated, list):
        stated = {one["name"]: one["template"] for one in stated}.get("default")
    if not isinstance(stated, str | None):
        raise TypeError("chat_template")
    return stated
