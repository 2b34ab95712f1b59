"""Class of an engine's end, from its output, the OOM kills and the supervisor's verdict. Pure.

vLLM's exit code is 1 for nearly everything, so the output decides. Only an explicit signal adds
information.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetkeeper_contract.exit_codes import EXIT_CODES, DeathClass
from fleetkeeper_engine.devices.kinds import out_of_memory
from fleetkeeper_engine.spec import Profile

DETAIL_BYTES = 2048
MESSAGE_BYTES = 500
LINE_BYTES = 4000
"""Kubernetes keeps 4096 bytes. Escaped characters take up to six each."""

_RULES: tuple[tuple[DeathClass, str, str], ...] = (
    (
        DeathClass.CUDA_OUT_OF_MEMORY,
        (
            rf"{out_of_memory(own_memory=True)}|torch\.OutOfMemoryError|"
            r"Free memory on device .* is less than desired|No available memory for the cache blocks"
        ),
        "the accelerator has no memory left for the model, its cache or a step",
    ),
    (
        DeathClass.HOST_OUT_OF_MEMORY,
        (
            rf"{out_of_memory(own_memory=False)}|^(\([^)]*\) )*MemoryError|Cannot allocate memory|"
            r"std::bad_alloc"
        ),
        "the model and its cache do not fit into the pod's memory",
    ),
    (
        DeathClass.UNSUPPORTED_ARCHITECTURE,
        (
            r"Model architectures? \[.*\] (are|is) not supported|model type `?'?[\w-]+'?`? but Transformers does not recognize|"
            r"not supported for now\. Supported architectures|has no vLLM implementation"
        ),
        "this vLLM does not support the model's architecture",
    ),
    (
        DeathClass.MODEL_NOT_FOUND,
        # Without credentials the hub answers 401 for a model that does not exist, so this comes
        # first.
        r"RepositoryNotFoundError|RevisionNotFoundError",
        "the model does not exist",
    ),
    (
        DeathClass.MODEL_NOT_READABLE,
        (
            r"PermissionError|Permission denied|GatedRepoError|401 Client Error|403 Client Error|"
            r"Client error '40[13] |"
            r"SafetensorError|HeaderTooLarge|MetadataIncompleteBuffer|is not a valid JSON file|"
            r"Cannot access gated repo|NoCredentialsError|PartialCredentialsError|EndpointConnectionError|"
            r"An error occurred \((403|AccessDenied|ExpiredToken|InvalidAccessKeyId|InvalidToken|SignatureDoesNotMatch)\)"
        ),
        "the model's files cannot be read",
    ),
    (
        DeathClass.MODEL_NOT_FOUND,
        (
            r"LocalEntryNotFoundError|404 Client Error|Client error '404 |"
            r"Invalid repository ID or local directory|is not a local folder and is not a valid model identifier|"
            r"Cannot find any model weights|does not appear to have a file named|NoSuchBucket|NoSuchKey|"
            r"No such file or directory: '[^']*(config\.json|safetensors|tokenizer|adapter)[^']*'"
        ),
        "the model does not exist",
    ),
    (
        DeathClass.BAD_ENGINE_OPTION,
        (
            r"api_server\.py: error: |entry\.py: error: |error: unrecognized arguments|error: argument --|"
            r"error: ambiguous option|pydantic_core\._pydantic_core\.ValidationError|"
            r"is larger than the available KV cache memory|To serve at least one request with the models's max seq len|"
            r"(max_model_len|max_num_batched_tokens|max_num_seqs|block_size|tensor_parallel_size|quantization|dtype)\b.*"
            r"(must be|should be|is not|cannot|greater than)|Unknown quantization method|"
            r"Bfloat16 is only supported on GPUs|Address already in use|address already in use"
        ),
        "vLLM rejected an option",
    ),
)
_COMPILED = tuple((death, re.compile(pattern), message) for death, pattern, message in _RULES)
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)*(?:ERROR [^\]]*\] ?)?")
"""Process, level, time and place before a line of vLLM's log."""
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception): ")
"""Pattern of the start of a traceback's last line."""
_FOLLOWS = re.compile(r"EngineDeadError|Executor failed|Engine core initialization failed")
"""An exception that only says that another process ended."""
_COUNTED = re.compile(r"ValidationError: \d+ validation errors? for")
_VALUE_ERROR = re.compile(r"(?:Value error|Assertion failed), (.+?)(?: \[type=.*)?$")
_ILLEGAL_INSTRUCTION = re.compile(r"exit ?code[=: ]+-4\b|SIGILL|Illegal instruction")


@dataclass(frozen=True, slots=True)
class Death:
    """The end of an engine, classified."""

    death: DeathClass
    message: str
    phase: str
    """document | plan | start | serve."""
    detail: str = ""

    @property
    def code(self) -> int:
        """Return the supervisor's exit code."""
        return EXIT_CODES[self.death]

    def termination_line(self) -> str:
        """Return one JSON line for the termination log, with up to 2 KiB of the last output."""
        detail = _last_bytes(self.detail, DETAIL_BYTES)
        while len(line := self._line(detail).encode()) > LINE_BYTES:
            detail = _last_bytes(detail, len(detail.encode()) // 2)
        return line.decode()

    def _line(self, detail: str) -> str:
        fields = {
            "class": self.death.value,
            "code": self.code,
            "phase": self.phase,
            "message": _last_bytes(self.message, MESSAGE_BYTES),
            "detail": detail,
        }
        return json.dumps(fields, ensure_ascii=False)


def classify_death(
    lines: Sequence[str], *, status: int | None, phase: str, oom_kills: int = 0, hang: str = ""
) -> Death:
    """Return the class of an engine's end.

    Args:
        lines: the last lines of the engine's output.
        status: its exit status, negative for a signal; None while it still runs (a hang).
        phase: start or serve.
        oom_kills: processes that the kernel OOM-killed since the start.
        hang: why the supervisor itself killed the engine; empty if it did not.
    """
    detail = "\n".join(lines)
    if hang:
        return Death(DeathClass.HUNG, hang, phase, detail)
    if oom_kills:
        return Death(
            DeathClass.HOST_OUT_OF_MEMORY,
            f"the kernel OOM-killed {oom_kills} process(es) of the pod",
            phase,
            detail,
        )
    for death, pattern, message in _COMPILED:
        found = next((line for line in lines if pattern.search(line)), None)
        if found is not None:
            return Death(death, f"{message}: {_shown(_explained(found, lines))}", phase, detail)
    if any(_ILLEGAL_INSTRUCTION.search(line) for line in lines) or status == -signal.SIGILL:
        return Death(
            DeathClass.BAD_ENGINE_OPTION,
            "this CPU does not support the instructions for the number format; set dtype to float32",
            phase,
            detail,
        )
    return Death(
        DeathClass.UNKNOWN, f"vLLM ended with {_status(status)}{_cause(lines)}", phase, detail
    )


def with_profile(death: Death, profile: Profile | None) -> Death:
    """Return a refused start with the name of the profile whose arguments vLLM got.

    A service's owner cannot correct an argument of the profile. Its administrator can.
    """
    if profile is None or death.death is not DeathClass.BAD_ENGINE_OPTION or death.phase != "start":
        return death
    named = (
        argument.partition("=")[0]
        for option, argument in zip(profile.options, profile.extra_arguments, strict=True)
        if re.search(rf"--(no-)?{re.escape(option)}(?![\w-])", death.message)
    )
    what = f"sets {next(named, 'extraArguments too')}"
    return replace(death, message=f"{death.message} (the engine profile {profile.name} {what})")


def _cause(lines: Sequence[str]) -> str:
    """Return `: ` and the first exception, which caused those below it. Return an empty text without one."""
    exceptions = (text for line in lines if _EXCEPTION.match(text := _shown(line)))
    cause = next((text for text in exceptions if not _FOLLOWS.search(text)), None)
    return "" if cause is None else f": {cause}"


def _status(status: int | None) -> str:
    if status is None:
        return "no status"
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"status {status}"


def _explained(found: str, lines: Sequence[str]) -> str:
    """Return the line with the reason: pydantic first counts the errors and then lists them."""
    if not _COUNTED.search(found):
        return found
    return next((match[1] for line in lines if (match := _VALUE_ERROR.search(line))), found)


def _shown(line: str) -> str:
    """Return a line of vLLM's output without the prefix of its log, short enough for a condition."""
    return _PREFIX.sub("", line).strip()[:300]


def _last_bytes(text: str, size: int) -> str:
    return text.encode("utf-8", "replace")[-size:].decode("utf-8", "ignore")
