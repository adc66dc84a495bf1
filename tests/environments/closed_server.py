"""An HTTP server that wants a key which nobody has: `python closed_server.py PORT`."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class _Closed(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(401)


HTTPServer(("127.0.0.1", int(sys.argv[1])), _Closed).serve_forever()
