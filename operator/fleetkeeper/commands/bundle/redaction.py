"""Redaction of what a support bundle contains. Every byte of a bundle passes here.

Better too much than too little: a long name may be redacted, a secret must not stay. The rules for
objects use the structure (env, arguments, names of keys): a sensitive name hides all that is below
it. Those for text recognize forms; a value in brackets is hidden up to the bracket that closes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import yaml

from fleetkeeper.commands.bundle.brackets import value_end

REDACTED: Final = "[redacted]"

PLAIN_VARIABLES: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "FLEETKEEPER_CONFIG",
        "FLEETKEEPER_LOG_FORMAT",
        "FLEETKEEPER_LOG_LEVEL",
        "HF_HUB_OFFLINE",
        "NCCL_DEBUG",
        "VLLM_LOGGING_LEVEL",
    }
)
"""Environment variables whose values stay."""
DROPPED: Final = frozenset({"managedFields", "binaryData", "stringData"})
"""Fields that are left out: of no use, or binary."""
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
PLAIN_HASHES: Final = frozenset({"fleetkeeper.io/template-hash", "pod-template-hash"})
REFERENCES: Final = frozenset(
    {"imagePullSecrets", "secret", "secretRef", "secrets", "serviceAccountToken", "tokenSecret"}
)
"""Fields of Kubernetes and of Fleetkeeper that name Secrets, by objects, and hold none."""
_REFERENCE_KEYS: Final = frozenset(
    {
        *("audience", "defaultMode", "expirationSeconds", "items", "key", "mode", "name"),
        *("namespace", "optional", "path", "secretName"),
    }
)

_WORDS: Final = (
    r"tokens?[_-]?value|token|passwords?|passwd|passphrase|pwd|(?<!by)(?<!com)pass|(?<![a-z])pw"
    r"|secrets?|api[_ -]?keys?|credentials?|authorization|bearer|cookies?|[_.-]key"
    r"|(?:access|private|account|signing)key|auth"
)
_SENSITIVE_NAME: Final = re.compile(rf"(?:{_WORDS})$", re.IGNORECASE)
_SENSITIVE_FLAG: Final = re.compile(rf"^-{{1,2}}[\w.-]*?(?:{_WORDS}|key)$", re.IGNORECASE)
_BRACKETED: Final = re.compile(
    rf"(?:(?:{_WORDS})\\*[\"']?[ \t]{{0,8}}(?::=|[:=])[ \t]{{0,8}}"
    rf"|(?:{_WORDS})\\*[\"'][ \t]{{0,8}},[ \t]{{0,8}}"
    rf"|(?<![\w-])--?[\w.-]{{0,60}}(?:{_WORDS}|-key)[ \t]+)"
    r"(?:[A-Za-z_][\w.]{0,63})?(?=[\[({])",
    re.IGNORECASE,
)
"""A name with its separator, before a value in brackets. A type, as in SecretStr('x'), may stand between."""
_VALUE: Final = (
    rf"(?:{re.escape(REDACTED)}"
    r"|\\+[\"'][^\n]{0,4096}?\\+[\"']"  # a quoted value in a JSON string
    r'|"(?:[^"\\\n]|\\.)*"?'
    r"|'(?:[^'\\\n]|\\.)*'?"
    r"|(?:bearer|basic)\s+\S+"
    r"|[^\s,;&]+)"
)
_CHARACTERS: Final = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")
_UNBROKEN: Final = re.compile(r"[a-z0-9]{32,}|[A-Z0-9]{32,}|[A-Za-z]{40,}")
_IMAGE_DIGEST: Final = "sha256:"


def _long_value(match: re.Match[str]) -> str:
    """Redact long base64, base64url, base32 and hex; keep image digests, UIDs and lower-case names."""
    text = match.group()
    before = match.string[max(0, match.start() - len(_IMAGE_DIGEST)) : match.start()]
    if before == _IMAGE_DIGEST and re.fullmatch(r"[0-9a-f]{64}", text):
        return text
    mixed = all(re.search(kind, text) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    return REDACTED if mixed or _UNBROKEN.search(text) else text


_RULES: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (
        re.compile(r"-----BEGIN [^-\n]{1,64}-----.*?(?:-----END [^-\n]{1,64}-----|\Z)", re.DOTALL),
        REDACTED,
    ),
    (re.compile(r"(?<![\w-])eyJ[\w-]+\.[\w-]+(?:\.[\w-]*)*"), REDACTED),
    # The user information of a URL. The second form is a password with characters of a path.
    (re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]{0,20}://)[^\s/?#\"']{0,512}@"), rf"\1{REDACTED}@"),
    (
        re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]{0,20}://)[^\s/:@\"']{0,256}:[^\s@\"']{1,512}@"),
        rf"\1{REDACTED}@",
    ),
    # The values of a query: signatures have many names.
    (re.compile(r"([?&][\w.%\[\]-]{1,100}=)[^&\s\"'<>\\]+"), rf"\1{REDACTED}"),
    # A header's value ends with its quote, or with its line.
    (
        re.compile(
            r"(\b(?:proxy-)?authorization|\bx-api-key|\b(?:set-)?cookie)"
            r"(\\*[\"']\s*[:=,]\s*\\*[\"'])[^\"'\n]+",
            re.IGNORECASE,
        ),
        rf"\1\2{REDACTED}",
    ),
    (
        re.compile(
            r"(\b(?:proxy-)?authorization|\bx-api-key|\b(?:set-)?cookie)([ \t]*[:=][ \t]*)(?![\"'\\\s])[^\n]+",
            re.IGNORECASE,
        ),
        rf"\1\2{REDACTED}",
    ),
    (re.compile(r"\b(bearer)(?:\s|%20|\+)+[^\s\"',;]+", re.IGNORECASE), rf"\1 {REDACTED}"),
    (re.compile(r"\b(Basic)\s+[A-Za-z0-9+/=_-]{8,}"), rf"\1 {REDACTED}"),
    # --api-key VALUE, and the same in a list.
    (
        re.compile(
            rf"((?<![\w-])--?[\w.-]{{0,60}}(?:{_WORDS}|-key))(\\*[\"']?[ \t]*,?[ \t]+|\\*[\"'],)(?!-){_VALUE}",
            re.IGNORECASE,
        ),
        rf"\1\2{REDACTED}",
    ),
    # A pair of Python, as of headers.
    (
        re.compile(
            rf"((?:{_WORDS})\\*[\"'][ \t]{{0,8}},[ \t]{{0,8}})(?=b?\\*[\"']){_VALUE}",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    # The commands of SMTP and Redis.
    (re.compile(r"\b(AUTH)[ \t]+[^\n\"']+"), rf"\1 {REDACTED}"),
    # Incorrect API key provided: value
    (
        re.compile(
            rf"((?:{_WORDS})(?:[ \t]+(?:given|is|provided|received|sent|used|was)){{1,3}}[ \t]*:[ \t]*){_VALUE}",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    # NAME_TOKEN=value, "password": "value"
    (
        re.compile(
            rf"((?:{_WORDS})\\*[\"']?[ \t]{{0,8}}(?::=|[:=])[ \t]{{0,8}}){_VALUE}", re.IGNORECASE
        ),
        rf"\1{REDACTED}",
    ),
    (
        re.compile(
            r"\b(?:hf_|sk-|sk_|pk_|rk_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|nvapi-|AIza)[\w-]{8,}"
        ),
        REDACTED,
    ),
    (_CHARACTERS, _long_value),
)


def redact_text(text: str) -> str:
    """Return the text without what looks like a credential."""
    text = _without_bracketed(text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def _without_bracketed(text: str) -> str:
    parts, end = [], 0
    while found := _BRACKETED.search(text, end):
        parts += [text[end : found.end()], REDACTED]
        end = value_end(text, found.end())
    return "".join([*parts, text[end:]])


def redact(value: Any, name: str = "") -> Any:  # noqa: ANN401 - any JSON
    """Return a copy of an API object, or of a part of it, without credentials.

    `name` is the key under which the part stands.
    """
    if value is None or isinstance(value, bool):
        return value
    if _SENSITIVE_NAME.search(name):
        return REDACTED
    if isinstance(value, Mapping):
        return _mapping(value, name)
    if isinstance(value, list | tuple):
        if name in {"args", "command"}:
            return _arguments([str(item) for item in value])
        return _list(value, name)
    return _string(value, name) if isinstance(value, str) else value


def _mapping(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    if name == "env":  # NAME: value, as in an InferenceService
        return {key: _variable(key, item) for key, item in value.items()}
    found: dict[str, Any] = {}
    for key, item in value.items():
        if key in DROPPED or key == LAST_APPLIED:
            found[key] = REDACTED
        elif key in PLAIN_HASHES and re.fullmatch(r"[0-9a-z]{1,64}", str(item)):
            found[key] = item
        elif key in REFERENCES and isinstance(item, Mapping | list):
            found[key] = _reference(item)
        elif _names_secret(name, str(key)) and isinstance(item, str):
            found[key] = redact_text(item)
        else:
            found[key] = redact(item, str(key))
    return found


def _names_secret(name: str, key: str) -> bool:
    """Return True if the value is the name of a Secret or of a key in it."""
    return key == "credentialsSecret" or (key in {"key", "name"} and name.endswith("Ref"))


def _reference(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return what names a Secret and its keys, without anything else."""
    if isinstance(value, list):
        return [_reference(item) for item in value]
    if not isinstance(value, Mapping):
        return REDACTED
    return {key: _kept(item) if key in _REFERENCE_KEYS else REDACTED for key, item in value.items()}


def _kept(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, str):
        return redact_text(value)
    return _reference(value) if isinstance(value, Mapping | list) else value


def _list(items: Sequence[Any], name: str) -> list[Any]:
    """Redact a list. One of a sensitive name and a string is a pair, as of headers."""
    if len(items) == 2 and all(isinstance(item, str) for item in items):
        first, second = items
        if _SENSITIVE_NAME.search(first):
            return [first, REDACTED]
        return [_string(first, name), _string(second, name)]
    return [_entry(item, name) for item in items]


def _entry(item: Any, name: str) -> Any:  # noqa: ANN401 - any JSON
    """Redact an entry of a list. The entries of `env` and headers are objects of name and value."""
    if isinstance(item, Mapping) and "name" in item and "value" in item:
        key = str(item["name"])
        rest = redact({k: v for k, v in item.items() if k != "value"})
        plain = name not in {"env", "httpHeaders"} and not _SENSITIVE_NAME.search(key)
        return {**rest, "value": redact(item["value"]) if plain else _variable(key, item["value"])}
    return redact(item, "" if isinstance(item, Mapping) else name)


def _variable(key: str, value: Any) -> Any:  # noqa: ANN401 - any JSON
    if key in PLAIN_VARIABLES or isinstance(value, Mapping):
        return redact(value)
    return REDACTED


def _arguments(items: list[str]) -> list[str]:
    found, hidden = [], False
    for item in items:
        flag, separator, value = item.partition("=")
        if hidden and not item.startswith("--"):
            found.append(REDACTED)
        elif separator and value and _SENSITIVE_FLAG.match(flag):
            found.append(f"{flag}={REDACTED}")
        else:
            found.append(_string(item, ""))
        # vLLM takes several keys after one --api-key.
        hidden = bool(_SENSITIVE_FLAG.match(item)) or (hidden and not item.startswith("--"))
    return found


def _string(text: str, name: str) -> str:
    """Redact a string by its structure if it is a document, else by its form."""
    document: Any = None
    try:
        if text.lstrip()[:1] in {"{", "["}:
            document = json.loads(text)
        elif name.endswith((".yaml", ".yml")):
            document = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return redact_text(text)
    if not isinstance(document, dict | list):
        return redact_text(text)
    document = redact(document)
    if name.endswith((".yaml", ".yml")):
        return str(yaml.safe_dump(document, sort_keys=False))
    return json.dumps(document, default=str)
