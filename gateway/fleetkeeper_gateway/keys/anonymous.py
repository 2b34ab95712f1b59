"""The mode without keys, for closed networks: all clients share one key."""

from __future__ import annotations

import asyncio

from fleetkeeper_contract.client_key_entries import parse_limit
from fleetkeeper_contract.client_keys import ANONYMOUS
from fleetkeeper_contract.tiers import TIER_BY_LABEL
from fleetkeeper_gateway.interfaces import Key
from fleetkeeper_gateway.keys.bearer import invalid
from fleetkeeper_gateway.keys.limits import Limit, limits_by_tier
from fleetkeeper_gateway.keys.settings import KeysSettings


class AnonymousKeys:
    """The same key for every request.

    Clients of OpenAI's API always send some key, so the Authorization header is ignored.
    """

    synced = True

    def __init__(self, settings: KeysSettings) -> None:
        self._key = Key(
            id=ANONYMOUS,
            name=ANONYMOUS,
            namespaces=None,
            highest=TIER_BY_LABEL[settings.anonymous_highest_tier],
            limits=limits_by_tier(
                _limit(settings.anonymous_requests_per_minute),
                _limit(settings.anonymous_tokens_per_minute),
                _limit(settings.anonymous_concurrency),
            ),
        )

    def authenticate(self, authorization: str | None, now: float) -> Key:  # noqa: ARG002 - as Keys has it
        """Return the anonymous key."""
        return self._key

    def named(self, key_id: str, now: float) -> Key:  # noqa: ARG002 - as Keys has it
        """Return the anonymous key.

        Raises:
            KeyRefused: the ID is not that of the anonymous key.
        """
        if key_id != ANONYMOUS:
            raise invalid(key_id)
        return self._key

    def in_force(self, key_id: str, now: float) -> bool:  # noqa: ARG002 - as Keys has it
        """Return whether the key is the anonymous key."""
        return key_id == ANONYMOUS

    async def run(self) -> None:
        """Wait: there is nothing to watch."""
        await asyncio.Event().wait()


def _limit(text: str) -> Limit:
    return parse_limit("limit", text) if text else ()
