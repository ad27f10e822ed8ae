"""redact: text of other programs without the credentials in it, for messages, logs and records.

Libraries put what they were called with into their errors: URLs with user and password, presigned URLs, headers. What
looks like a credential becomes `***`; everything else stays as it is.
"""

from __future__ import annotations

import re

# The password of a URL may hold the characters that end it elsewhere; a number before a slash is a port.
_USER_INFO = re.compile(r"(\w+://)(?:[^/\s@]+|[^\s/@:]+:(?!\d+[/?#])[^\s@]*)@")
_NAMES = r"token(?!iz)|secret|password|passwd|signature|api[-_]?key|sig"
_PARAMETER = re.compile(
    rf"(?i)((?:(?:{_NAMES})[\w-]*['\"]?\s*=|(?:{_NAMES})s?['\"]?\s*:)\s*['\"]?)[^\s&,;'\"]+"
)
_PRESIGNED = re.compile(r"(?i)([?&](?:[\w-]*credential|policy|key-pair-id)=)[^\s&'\"]+")
_HEADER = re.compile(r"(?i)(\bauthorization['\"]?\s*[=:]\s*['\"]?(?:\w+\s+)?)[^\s,;'\"]+")


def redact(text: str) -> str:
    """The text without passwords, tokens and signatures."""
    text = _USER_INFO.sub(r"\1***@", text)
    for pattern in (_PARAMETER, _PRESIGNED, _HEADER):
        text = pattern.sub(r"\1***", text)
    return text
