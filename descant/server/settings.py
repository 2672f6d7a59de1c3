"""The HTTP server's settings: times and limits (``http.*``)."""

from __future__ import annotations

from dataclasses import dataclass

from descant.wire import decode, requests


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    long_poll_s: float = 25.0
    """How long ``retrieve_future`` is held open; the SDK gives up on it after 45 s."""
    max_body_bytes: int = decode.MAX_BODY_BYTES
    """Of a training request's body, before and after decompression. Others have lower limits of their own."""
    max_sample_elements: int = requests.MAX_SAMPLE_ELEMENTS
    """Token ids in a sampling request, targets among them."""
    max_bodies_bytes: int = 512 * 2**20
    """Of all bodies that are arriving or being decoded; an owner may have half."""
    body_timeout_s: float = 60.0
    """How long a body may take to arrive at most; the SDK gives up on a request after 60 s."""
    header_timeout_s: float = 20.0
    """How long a connection may be open without a key, and the headers of a request may take."""
    idle_timeout_s: float = 75.0
    """How long a connection with a key is kept between two requests."""
    max_connections: int = 16384
    """Fewer where the process may not open so many files. Half of them for one owner."""
    max_unauthenticated_per_address: int = 512
    """Connections of one address on which no key has come yet; not counted from loopback and ``trusted_proxies``."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks from which many users come."""
