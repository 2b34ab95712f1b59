"""The points of vLLM where tokens are counted.

vLLM's own counters (`vllm:prompt_tokens_total` and its like) are sums over the outputs that
`OutputProcessor` handles. So the same method counts here, for the same outputs, in the same order:
the sums are equal, also for requests that are aborted. vLLM's classes are not public. The
parts that are needed of them are checked in every version. Without them, requests run as before and
are not counted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from fleetkeeper_engine.in_vllm.usage.accounts import Accounts

MODULE = "vllm.v1.engine.output_processor"
NEEDED = (
    "add_request",
    "abort_requests",
    "propagate_error",
    "_finish_request",
    "_update_stats_from_output",
)
_MARK = "_fleetkeeper_usage"

Action = Callable[..., None]


def install(accounts: Accounts) -> bool:
    """Count the tokens of the vLLM in this process. Return whether it has what that needs."""
    # The API server has imported it long before; an import here would load vLLM anywhere else.
    module = sys.modules.get(MODULE)
    processor = getattr(module, "OutputProcessor", None)
    output = getattr(module, "EngineCoreOutput", None)
    possible = (
        processor is not None
        and all(callable(getattr(processor, name, None)) for name in NEEDED)
        and "prefill_stats" in getattr(output, "__annotations__", ())
    )
    if possible:
        hook(processor, accounts)
    accounts.set_counting(possible)
    return possible


def hook(processor: Any, accounts: Accounts) -> None:  # noqa: ANN401 - vLLM's class OutputProcessor
    """Let every call of the needed methods reach the accounts. A second call changes nothing."""
    if getattr(processor, _MARK, False):
        return
    setattr(processor, _MARK, True)
    for name, action in _actions(accounts).items():
        setattr(processor, name, _followed(getattr(processor, name), action, accounts))


def _actions(accounts: Accounts) -> dict[str, Action]:
    def added(_result: object, _processor: object, request: Any, *_: object, **__: object) -> None:  # noqa: ANN401 - EngineCoreRequest
        adapter = getattr(request, "lora_request", None)
        accounts.add(request.request_id, "" if adapter is None else str(adapter.lora_name))

    def counted(
        _result: object,
        _processor: object,
        state: Any,  # noqa: ANN401 - RequestState
        output: Any,  # noqa: ANN401 - EngineCoreOutput
        *_: object,
        **__: object,
    ) -> None:
        # As IterationStats.update_from_output has it: prefill counts once, with the first output.
        prefill = output.prefill_stats if state.is_prefilling else None
        answer = len(output.new_token_ids)
        if prefill is None:
            accounts.count(state.request_id, 0, 0, answer)
        else:
            accounts.count(
                state.request_id, prefill.num_prompt_tokens, prefill.num_cached_tokens, answer
            )

    def finished(_result: object, _processor: object, state: Any, *_: object, **__: object) -> None:  # noqa: ANN401 - RequestState
        accounts.remove(state.request_id, aborted=False)

    def aborted(result: Any, *_: object, **__: object) -> None:  # noqa: ANN401 - the IDs
        for sequence in result:
            accounts.remove(sequence, aborted=True)

    def died(*_: object, **__: object) -> None:
        accounts.remove_all()

    return {
        "add_request": added,
        "abort_requests": aborted,
        "propagate_error": died,
        "_finish_request": finished,
        "_update_stats_from_output": counted,
    }


def _followed(original: Callable[..., Any], action: Action, accounts: Accounts) -> Any:  # noqa: ANN401 - as vLLM's
    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as vLLM's
        result = original(*args, **kwargs)
        try:
            action(result, *args, **kwargs)
        except Exception as problem:  # noqa: BLE001 - after any error, requests continue
            accounts.report(problem)
        return result

    return followed
