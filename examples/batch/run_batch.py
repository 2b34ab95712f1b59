"""Run a file of requests with OpenAI's client, unchanged: upload, create, wait, read each line's result.

    pip install openai
    export OPENAI_BASE_URL=https://llm.example.com/v1 OPENAI_API_KEY=fk_...
    python run_batch.py requests.jsonl

`fleetkeeper batch submit`, `status` and `fetch` do the same without a program.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from openai import OpenAI

ENDED = {"completed", "failed", "expired", "cancelled"}


def main(path: Path, every_s: float = 10.0) -> None:
    """Run a file, and print the result of each line with its custom_id."""
    client = OpenAI()
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ENDED:
        time.sleep(every_s)
        batch = client.batches.retrieve(batch.id)
        print(batch.status, batch.request_counts, file=sys.stderr)
    if batch.errors and batch.errors.data:
        for mistake in batch.errors.data:
            where = f"line {mistake.line}: " if mistake.line else ""
            print(f"{where}{mistake.message}", file=sys.stderr)
        sys.exit(1)
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        for line in client.files.content(file_id).text.splitlines():
            result = json.loads(line)
            print(result["custom_id"], json.dumps(result["response"] or result["error"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
