"""Writes the boards' JSON: python -m deploy.grafana.source [FOLDER]."""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.source.cluster import overview, request_path
from deploy.grafana.source.transfer import drafts, transfer
from deploy.grafana.source.workers import router, workers

FOLDER = Path(__file__).parents[1] / "boards"
BOARDS = {
    "overview": overview,
    "request": request_path,
    "transfer": transfer,
    "drafts": drafts,
    "workers": workers,
    "router": router,
}


def rendered() -> dict[str, str]:
    """Each board's JSON, by the name of its file."""
    return {
        f"{name}.json": json.dumps(build(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        for name, build in BOARDS.items()
    }


def write(folder: Path) -> None:
    """Put the boards into `folder`."""
    for name, text in rendered().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
