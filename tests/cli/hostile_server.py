"""A server that looks like Prefect's and hands out a state with a result of its choice."""

from __future__ import annotations

import base64
import http.server
import json
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUMBER = "11111111-1111-4111-8111-111111111111"
NOW = "2026-01-01T00:00:00Z"


class Payload:
    """Whoever unpickles it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def pickled_record(mark: Path) -> bytes:
    """A stored result as Prefect writes it, that makes `mark` when it is read."""
    text = base64.encodebytes(pickle.dumps(Payload(mark))).decode()
    return json.dumps({"metadata": {"serializer": {"type": "pickle"}}, "result": text}).encode()


def metadata(key: str, serializer: str = "json") -> dict[str, Any]:
    """A result that lies in the storage that this server describes."""
    return {
        "storage_key": key,
        "serializer": {"type": serializer},
        "storage_block_id": NUMBER,
        "prefect_version": "3.7.7",
    }


def answers(storage: Path, data: Any) -> dict[tuple[str, str], Any]:
    """What it answers, by method and end of the path; None: 404."""
    state = {"id": NUMBER, "type": "COMPLETED", "name": "Completed", "timestamp": NOW}
    kind = {"id": NUMBER, "created": NOW, "name": "Local File System", "slug": "local-file-system"}
    flow = {"id": NUMBER, "created": NOW, "updated": NOW, "name": "train"}
    pending = {"id": NUMBER, "type": "PENDING", "name": "Pending", "timestamp": NOW}
    run = {**flow, "flow_id": NUMBER, "state": pending, "state_type": "PENDING", "run_count": 0}
    schema = {"id": NUMBER, "checksum": "sha256:0", "fields": {}, "block_type_id": NUMBER}
    document = {
        "id": NUMBER,
        "name": "hostile",
        "data": {"basepath": str(storage)},
        "block_schema_id": NUMBER,
        "block_schema": {**schema, "block_type": kind},
        "block_type_id": NUMBER,
        "block_type": kind,
    }
    rejected = {"status": "REJECT", "state": {**state, "data": data}}
    return {
        ("GET", "/health"): True,
        ("GET", "/admin/version"): "3.7.7",
        ("GET", "/admin/storage"): {"default_result_storage_block_id": None},
        ("GET", f"/block_documents/{NUMBER}"): document,
        ("GET", f"/flow_runs/{NUMBER}"): run,
        ("POST", "/flows/"): flow,
        ("POST", "/flow_runs/"): run,
        ("POST", "/flow_runs/filter"): [],
        ("POST", "/set_state"): {**rejected, "details": {"type": "reject_details", "reason": "x"}},
        ("PATCH", f"/flow_runs/{NUMBER}"): {},
    }


@contextmanager
def hostile_server(storage: Path, data: Any) -> Iterator[str]:
    """Its API URL. data: what the state that it hands out carries."""
    known = answers(storage, data)

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            path = self.path.partition("?")[0]
            ends = [end for end in known if end[0] == self.command and path.endswith(end[1])]
            self.send_response(200 if ends else 404)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(known[max(ends, key=len)] if ends else {}).encode())

        do_GET = do_POST = do_PATCH = answer  # noqa: N815

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/api"
        httpd.shutdown()
