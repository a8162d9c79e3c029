"""A process for the supervisor's tests: serves /health on PORT and behaves as MODE says.

steady: healthy until SIGTERM.          deaf: healthy, ignores SIGTERM.
sick: never healthy.                    mortal: healthy, ends with status 3 when GET /die comes.
parent: as steady, with a child of its own that ignores SIGTERM.
router: serves, and says that it has found its decode worker but not its prefill worker.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from kvrail.cli.cluster.watch import end_with_parent

mode, port, notes = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


FOUND = {"decode_workers": {"d:1": {"state": "healthy"}}, "prefill_workers": {"p:1": {"state": "down"}}}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            sys.stderr.write("the last words\n")
            sys.stderr.flush()
            os._exit(3)
        self.send_response(503 if mode == "sick" else 200)
        if mode == "router":
            self.send_header("Content-Type", "application/json")
        self.end_headers()
        if mode == "router":
            self.wfile.write(json.dumps(FOUND).encode())

    def log_message(self, *_):
        pass


def stop(*_):
    with notes.open("a") as file:
        file.write(f"{port} got SIGTERM\n")
    if mode != "deaf":
        os._exit(0)


signal.signal(signal.SIGTERM, stop)
end_with_parent(0.2)
with notes.open("a") as file:
    file.write(f"{port} pid {os.getpid()}\n")
    if mode == "parent":
        file.write(f"{port} pid {subprocess.Popen([sys.executable, '-c', SLEEPER]).pid}\n")
sys.stdout.write(f"{mode} is up\n")
sys.stdout.flush()
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
