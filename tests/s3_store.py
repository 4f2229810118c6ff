"""An S3 server on this machine, one at a time, which stores its objects in the memory of the calling process."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import requests
import s3fs  # noqa: F401 - before ranks are forked, each of which would import it
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise a line per request
SECRET = "a-secret-that-no-file-may-hold"


@contextmanager
def s3_store() -> Iterator[str]:
    """Yield the URL of a new bucket, which this process and its children reach through environment variables."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "AKIDOFTHETESTS",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        requests.post(f"http://{host}:{port}/moto-api/reset", timeout=10).raise_for_status()  # all servers of a process
        requests.put(f"http://{host}:{port}/bucket", timeout=10).raise_for_status()
        yield "s3://bucket"
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(before)
