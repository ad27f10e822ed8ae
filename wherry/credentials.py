"""credentials: passwords, tokens, signatures and access keys, found in text and taken out of it.

Every quantifier that can meet text of a checkpoint is bounded: names of tensors have any length, and a pattern that
scans the rest of a text from each of its words takes the square of its length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ACCESS_KEY = r"(\b)(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # of Amazon
# Each pattern matches the text before a credential, as a group, and the credential. The password of a URL may contain
# characters that end it elsewhere; a number that is used as a port before a slash is one.
_USER = r"((?<!\w)\w[\w+.-]{0,31}://)(?:[^/\s]{1,256}|[^\s/@:]{1,256}:(?!(?:80|443|\d{4,5})[/?#])[^\s@]{0,256})(?=@)"
_KEYS = r"(?:api|access|private|account|shared)[-_]?(?:access[-_]?)?key"
_SIGNATURES = r"signature|(?:(?<![A-Za-z])|(?<=%3F)|(?<=%26))sig"
_SECRETS = rf"secret|password|passwd|passphrase|{_KEYS}"
# The tokens of a vocabulary are no credentials: those of these names, and what has a number, or a word such as `<pad>`.
_TOKEN = (
    "".join(f"(?<!{one}_)" for one in ("eos", "bos", "pad", "unk", "sep", "cls", "mask")) + r"token(?!iz)"
)
_OF_VOCABULARY = (
    r"(?!(?:\[\s{0,8})?(?:[-+]?[\d.]{1,15}(?:e[-+]?\d{1,3})?|none|null|true|false|nan|VALUE|N|…|</?[^\s<>]{1,64}>)"
    r"(?:[^\w+/=@:-]|\Z))"
)
# `name=`, `name: ` and `'name': `; a signature is one only where it cannot be a word of a sentence or a heading.
_NAME = (
    rf"(?:(?:{_SECRETS}|{_SIGNATURES})[\w-]{{0,64}}['\"]?\s{{0,8}}(?:=|%3D)|(?:{_SECRETS})s?['\"]?\s{{0,8}}:"
    rf"|['\"](?:{_SIGNATURES})['\"]\s{{0,8}}:)\s{{0,8}}"
)
_TOKEN_NAME = rf"{_TOKEN}(?:[\w-]{{0,64}}['\"]?\s{{0,8}}(?:=|%3D)|s?['\"]?\s{{0,8}}:)\s{{0,8}}"
_QUERY_NAMES = (
    r"[\w-]{0,64}credential|policy|key-pair-id|sas|auth|pwd|pass|jwt|key|cred|session(?:[-_]?id)?|hmac"
)
_TOKENS = (  # of Hugging Face, GitHub, GitLab, Slack, Google, OpenAI, Anthropic, npm, Docker, PyPI, Databricks, Prefect
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOOG1E[A-Z0-9]{20,}|sk-(?:proj|ant|svcacct)-[\w-]{20,}|sk-[A-Za-z0-9]{32,}"
    r"|npm_[A-Za-z0-9]{30,}|dckr_pat_[\w-]{20,}|pypi-[\w-]{40,}|dapi[0-9a-f]{32}|pn[ub]_[A-Za-z0-9]{20,}"
)
_PATTERNS = (
    _USER,
    r"((?<![\w+.-])[A-Za-z][\w+.-]{1,31}:/)[^/\s@:]{1,256}:[^/\s@]{1,256}(?=@)",  # a URI that was taken for a path
    rf"(?i)({_NAME}(['\"]))(?:(?!\2)[^\n]){{1,512}}(?=\2)",
    rf"(?i)({_NAME}['\"]?)[^\s&,;'\"]+",
    rf"(?i)({_TOKEN_NAME}(['\"]))(?!</?[^\s<>]{{1,64}}>)(?:(?!\2)[^\n]){{1,512}}(?=\2)",
    rf"(?i)({_TOKEN_NAME}['\"]?){_OF_VOCABULARY}[^\s&,;'\"]+",
    rf"(?i)([?&](?:{_QUERY_NAMES})=)[^\s&'\"]+",
    r"([?&][\w.-]{0,64}%[\w.%-]{0,64}=)[^\s&'\"]+",  # a name that is hidden behind percent signs
    ACCESS_KEY,
    rf"(\b)(?:{_TOKENS})",
    r"((?<![\w-]))eyJ[\w-]{10,4096}\.[\w-]{10,65536}\.[\w-]+",  # a JSON web token
    r"(-----BEGIN [A-Z ]{0,24}PRIVATE KEY-----)[^-]+",
    r"(\bhooks\.slack\.com/services/|\bdiscord(?:app)?\.com/api/webhooks/)[\w/-]+",
    r"(?i)(\bbearer\s{1,8})(?=[\w.~+/=-]{6})[\w.~+/=-]*\d[\w.~+/=-]*",
    r"(?i)(\bauthorization['\"]?\s{0,8}[=:]\s{0,8}['\"]?(?:\w{1,32}\s{1,8})?)[^\s,;'\"]+",
)
_HINT = (
    r"(?i):/|AKIA|ASIA|AIza|eyJ|hf_|gh\w_|github_|glpat-|xox\w-|ya29|GOOG1E|sk-|npm_|dckr_|pypi-|dapi|pn[ub]_|[?&]"
    rf"|PRIVATE KEY|hooks|token|secret|passw|passph|sig|{_KEYS}|bearer|authorization"
)
# In what a user states about a checkpoint, these words name a credential, too.
_STATED = (
    r"(?i)(?:^|[^a-z])(?:auth|cookie|cred(?:ential)?s?|pw|sas|jwt|bearer|pass|passcode|passkey|psk|otp|pat|login)"
    r"(?:$|[^a-z])|pwd(?:$|[^a-z])|(?:^|(?<!public)[_. -])key$"
)
_ARGUMENTS = (
    r"(?i)((?:^|\s)--?[\w-]{0,64}(?:token|secret|passw(?:or)?d|pass|api[-_]?key)\s{1,8}"
    r"|(?:^|\s)-u\s{1,8}[^\s:]{1,256}:)\S+"
)


def redact(text: str) -> str:
    """The text without passwords, tokens, signatures and names of access keys, in time that grows with its length.

    Numbers of tokens stay, as in `eos_token_id = 1`, and so do a vocabulary's own tokens, as in `pad_token: '<pad>'`.
    """
    if not re.search(_HINT, text):
        return text
    for pattern in _PATTERNS:
        text = re.sub(pattern, r"\1***", text)  # compiled on first use: most commands never fail
    return text


def redact_values(values: Mapping[str, str]) -> dict[str, str]:
    """Name and value pairs of a user without credentials, by the name (`token`) or in the value.

    The number in `tokens=2e12`, `token_accuracy=0.7` or `pass=2` is none.
    """
    return {
        redact(name): "***" if _names_a_secret(name, value) else re.sub(_ARGUMENTS, r"\1***", redact(value))
        for name, value in values.items()
    }


def uri_has_credentials(uri: str) -> bool:
    """Whether a URI of a store carries a user's name, a password, a signature, a token or an access key."""
    _, _, rest = uri.partition("://")
    query = uri[uri.find("?") :] if "?" in uri else ""
    named = "@" in rest.split("/")[0] or re.search(_USER, uri) or re.search(ACCESS_KEY, rest)
    return bool(named) or redact(query) != query


def _names_a_secret(name: str, value: str) -> bool:
    is_number = re.fullmatch(r"[-+]?[\d.]+(?:e[-+]?\d+)?|nan|-?inf", value)
    left = re.sub(r"(?i)tokens?|(?<![a-z])pass(?![a-z])", "", name) if is_number else name
    return redact(f"{left}=x") != f"{left}=x" or re.search(_STATED, left) is not None
