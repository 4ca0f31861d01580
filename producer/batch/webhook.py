"""The end of a batch, told to a URL: a POST of what `batch status --json` prints, until one is answered 2xx."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from broker.batches import Batch
from producer.batch.api_object import api_object
from producer.refusal import Refused

TIMEOUT_S = 10.0
MOST_TRIES = 10
FIRST_WAIT_S = 10
LONGEST_WAIT_S = 3600
_NOT_CARRIED = re.compile(r"[^!-~]")
"""In the first line of a request of HTTP: what is not a visible character of ASCII."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would become a GET without its body, to a place that nobody named."""

    def redirect_request(self, *_: Any) -> None:
        """There is none: the answer is what the server said."""


_opener = urllib.request.build_opener(_NoRedirects)


def check_url(url: str) -> None:
    """Refuse what no batch can be posted to.

    Raises:
        Refused: it is not a URL of a web server, or has characters that HTTP does not carry.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as the resolver does: no empty labels, none too long
    except ValueError:
        host, port = "", None
    if not host or parts.scheme not in ("http", "https") or port == 0 or parts.username is not None:
        raise Refused("--webhook: give a URL such as https://example.org/hook, without user and password")
    if _NOT_CARRIED.search(url):
        raise Refused(
            "--webhook: write characters beyond ASCII, and spaces, as a URL has them: gr%C3%BC%C3%9Fe for grüße in a "
            "path, xn--... for a host"
        )


def post(url: str, batch: Batch) -> str | None:
    """Tell the URL; what went wrong, or None. `webhook-id` is the same for each try."""
    request = urllib.request.Request(
        url,
        json.dumps(api_object(batch)).encode(),
        {
            "Content-Type": "application/json",
            "User-Agent": "millstream",
            "webhook-id": f"{batch.id}.{batch.status}",
        },
    )
    try:
        with _opener.open(request, timeout=TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}"
    except urllib.error.URLError as error:
        return f"it cannot be reached ({error.reason})"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"it cannot be reached ({type(error).__name__})"


def wait_s(tries: int) -> int:
    """How long to wait after so many tries."""
    return min(FIRST_WAIT_S << (tries - 1), LONGEST_WAIT_S)
