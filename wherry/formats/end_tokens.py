"""End tokens: what the files next to a model state about the tokens at which a server stops, and where they disagree.

A server of a Hugging Face folder stops at the `eos_token_id` of `generation_config.json`; without one, at that of
`config.json`. The tokenizer names a token of its own as the end, and a chat template ends each turn with one. Only what
these files state is compared: a token whose number no list of added tokens states is compared with nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from wherry.core.json_document import decoder, parse_json
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import SMALL, scale_limit
from wherry.core.units import plural
from wherry.cures import Argument, Cure
from wherry.errors import CorruptError, HostileError
from wherry.store.location import MOST_CONFIG, Location

CONFIG, GENERATION, SETTINGS = "config.json", "generation_config.json", "tokenizer_config.json"
TOKENIZER, _SPECIAL_MAP = "tokenizer.json", "special_tokens_map.json"
# Where transformers 5 looks for a chat template, the first that exists: the last belongs to processors.
_TEMPLATE, _PROCESSOR_TEMPLATE = "chat_template.jinja", "chat_template.json"
OUTSIDE, DIFFER, TEMPLATE, UNREAD = "outside", "differ", "template", "unread"
# The tokens with which published chat templates end a turn, and models that do; a template may name several.
END_OF_TURN = (
    "<|im_end|>",  # ChatML: Qwen, SmolLM
    "<|eot_id|>",  # Llama 3
    "<|eot|>",  # Llama 4
    "<end_of_turn>",  # Gemma 1 to 3
    "<turn|>",  # Gemma 4
    "<|end|>",  # Phi 3; gpt-oss, which stops at `<|return|>`
    "<|return|>",
    "<|end_of_text|>",  # Granite
    "<|END_OF_TURN_TOKEN|>",  # Cohere
    "<|end_of_turn|>",  # OpenChat
    "<｜end▁of▁sentence｜>",  # noqa: RUF001  DeepSeek
)
_CURE = Cure(
    "correct it next to the source, or pass a folder with the right files with {}, and convert again",
    Argument("assets"),
)
# The list of added tokens, which the tokenizers library writes before the vocabulary.
_ADDED = re.compile(r'"added_tokens"\s*:\s*\[')
_NEXT = re.compile(r"[\s,]*")
_MOST_HEAD, _MOST_ADDED = 4 << 20, 1 << 16


@dataclass(frozen=True, slots=True)
class EndTokenFault:
    """A disagreement of the files of a model about its end tokens.

    Attributes:
        kind: `outside` (a number outside of the vocabulary), `differ` (two files state different ones), `template` (the
            chat template ends a turn with a token at which no server stops) or `unread` (a file that is not read).
        file: the file that states it.
        text: what is wrong, and the cure.
    """

    kind: str
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class EndTokens:
    """What the files of a model state about its special tokens.

    Attributes:
        ends: file → the numbers of end tokens that it states.
        begins: file → the numbers of the first token of a text that it states.
        named: `bos_token`, `eos_token`, `pad_token` and `unk_token` → the tokenizer's text for it.
        numbers: text of an added token → its number.
        special: numbers of all special tokens.
        template: the chat template; None if there is none.
        vocabulary: size of the vocabulary; None if no config states it.
        faults: where the files disagree.
    """

    ends: Mapping[str, tuple[int, ...]]
    begins: Mapping[str, tuple[int, ...]]
    named: Mapping[str, str]
    numbers: Mapping[str, int]
    special: frozenset[int]
    template: str | None
    vocabulary: int | None
    faults: tuple[EndTokenFault, ...] = ()


def read_end_tokens(names: Collection[str], read: Callable[[str], Location]) -> EndTokens:
    """Read what the files of a model state about its end tokens.

    Args:
        names: the files next to the weights, relative to the folder.
        read: the location of one of them.

    Raises:
        NotFoundError, StorageError: a file cannot be read. One that is invalid is a fault of kind `unread`.
    """
    faults: list[EndTokenFault] = []

    def table(name: str) -> dict[str, Any]:
        try:
            data = read(name).read_whole(MOST_CONFIG) if name in names else b"{}"
            found = parse_json(data, name, limits=SMALL)
        except (CorruptError, HostileError) as error:
            faults.append(EndTokenFault(UNREAD, name, f"end tokens of {name} are not compared: {error.what}"))
            return {}
        return found if isinstance(found, dict) else {}

    config, generation, settings = table(CONFIG), table(GENERATION), table(SETTINGS)
    inner = config.get("text_config")
    config = {**(inner if isinstance(inner, dict) else {}), **config}
    size = config.get("vocab_size")
    added = _added_tokens(names, read, settings)
    named = _named_tokens({**table(_SPECIAL_MAP), **settings})
    stated = {CONFIG: config, GENERATION: generation}
    ends, begins = (
        {
            **{file: ids for file, one in stated.items() if (ids := _numbers(one.get(f"{name}_id")))},
            **({"the tokenizer": (added[named[name]][0],)} if named.get(name) in added else {}),
        }
        for name in ("eos_token", "bos_token")
    )
    pads = [number for one in stated.values() for number in _numbers(one.get("pad_token_id"))]
    special = {number for number, is_special in added.values() if is_special}
    special |= {*pads, *(number for one in (ends, begins) for ids in one.values() for number in ids)}
    found = EndTokens(
        ends=ends,
        begins=begins,
        named=named,
        numbers={text: number for text, (number, _) in added.items()},
        special=frozenset(special),
        template=_template(names, read, settings, table),
        vocabulary=size if type(size) is int and size > 0 else None,
    )
    return replace(found, faults=(*faults, *_outside(found), *_different(found), *_of_template(found)))


def _numbers(value: Any) -> tuple[int, ...]:
    """The numbers of a token, or of several, as a config states them."""
    values = value if isinstance(value, list) else [value]
    return tuple(one for one in values if type(one) is int)


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the tokenizer's special tokens, each a text or a table with its `content`."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _added_tokens(
    names: Collection[str], read: Callable[[str], Location], settings: Mapping[str, Any]
) -> dict[str, tuple[int, bool]]:
    """The added tokens of a tokenizer: text → number, and whether it is special."""
    listed, found = settings.get("added_tokens_decoder"), dict[str, tuple[int, bool]]()
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        if number.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            found[entry["content"]] = int(number), entry.get("special") is True
    if TOKENIZER in names:
        found |= _listed_tokens(read(TOKENIZER).read(0, scale_limit(_MOST_HEAD)))
    return found


def _listed_tokens(head: bytes) -> Iterator[tuple[str, tuple[int, bool]]]:
    """The added tokens in the first bytes of `tokenizer.json`; its vocabulary is not parsed."""
    text, scan = head.decode("utf-8", "ignore"), decoder(unique=False, constants=True).raw_decode
    start = _ADDED.search(text)
    at = start.end() if start else len(text)
    for _ in range(_MOST_ADDED):
        at = _NEXT.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
        if text[at : at + 1] != "{":
            return
        try:
            entry, at = scan(text, at)
        except (ValueError, RecursionError):
            return
        if type(entry.get("id")) is int and isinstance(entry.get("content"), str):
            yield entry["content"], (entry["id"], entry.get("special") is True)


def _template(
    names: Collection[str],
    read: Callable[[str], Location],
    settings: Mapping[str, Any],
    table: Callable[[str], Mapping[str, Any]],
) -> str | None:
    """The chat template that transformers uses by default."""
    if _TEMPLATE in names:
        return read(_TEMPLATE).read_whole(MOST_CONFIG).decode("utf-8", "replace")
    found = settings.get("chat_template")
    if found is None and _PROCESSOR_TEMPLATE in names:
        found = table(_PROCESSOR_TEMPLATE).get("chat_template")
    if isinstance(found, list):  # several, each with a name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _outside(tokens: EndTokens) -> Iterator[EndTokenFault]:
    size = tokens.vocabulary
    for name, stated in (("eos", tokens.ends), ("bos", tokens.begins)):
        for file, ids in stated.items():
            wrong = [] if size is None else [one for one in ids if not 0 <= one < size]
            if size is not None and wrong:
                what = f"outside of the vocabulary of {plural(size, 'token')}"
                text = f"{file} states the {name} token {_number_list(wrong)}, {what}: {_CURE}"
                yield EndTokenFault(OUTSIDE, file, text)


def _different(tokens: EndTokens) -> Iterator[EndTokenFault]:
    """Where a server would stop at other tokens than a file states, or begin with another one."""
    for name, stated in (("eos", tokens.ends), ("bos", tokens.begins)):
        used = GENERATION if GENERATION in stated else CONFIG
        for file, ids in stated.items() if used in stated else ():
            other = [one for one in ids if one not in stated[used]]
            if other:
                what = f"but {used}, which servers follow, {_number_list(stated[used])}"
                text = f"{file} states the {name} token {_number_list(other)}, {what}: {_CURE}"
                yield EndTokenFault(DIFFER, file, text)


def _of_template(tokens: EndTokens) -> Iterator[EndTokenFault]:
    """A chat template none of whose ends of turns is an end token."""
    ends = [one for one in END_OF_TURN if tokens.template is not None and one in tokens.template]
    file = GENERATION if GENERATION in tokens.ends else CONFIG
    stops = tokens.ends.get(file, ())
    if not ends or any(tokens.numbers.get(one) in stops for one in ends):
        return
    known = [f"{one} ({tokens.numbers[one]})" for one in ends if one in tokens.numbers]
    shown = " and ".join(known or ends)
    if known:
        stated = f"whose eos_token_id is {_number_list(stops)}" if stops else "which states no eos_token_id"
        yield EndTokenFault(
            TEMPLATE, file,
            f"the chat template ends a turn with {shown}, at which no server stops by {file}, {stated}: if the model "
            "was trained with this template, add the number to eos_token_id there; if it is a base model, leave the "
            "template out; then convert again",
        )  # fmt: skip
    elif tokens.numbers:
        yield EndTokenFault(
            TEMPLATE, SETTINGS,
            f"the chat template ends a turn with {shown}, which is no added token of the tokenizer: the template is of "
            f"another model; {_CURE}",
        )  # fmt: skip


def _number_list(ids: Collection[int]) -> str:
    return ", ".join(map(str, ids))
