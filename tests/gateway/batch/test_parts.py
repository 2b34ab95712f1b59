"""Settings with which the batch process must not start."""

from __future__ import annotations

import pytest

from fleetkeeper_gateway.batch.parts import AllSettings, create_parts
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.server import CannotStart


@pytest.mark.parametrize(
    "url", ["", "gateway:8080", "http://", "https://:80", "https://x/v1", "https://x/y/v1/"]
)
async def test_an_upstream_that_would_answer_no_line_is_refused(url: str) -> None:
    """Each line would get an error, and the batch would be completed."""
    settings = AllSettings(batch=BatchSettings(batch_upstream=url))
    with pytest.raises(CannotStart, match=r"FLEETKEEPER_GATEWAY_BATCH_UPSTREAM .*without /v1"):
        async with create_parts(settings):
            pass
