"""Records of a job in etcd, through its JSON gateway (etcd 3.4 and later).

Every write is a transaction conditional on this process being the head. A member that does not
answer is skipped for the next; a request whose answer was lost may be sent twice, which is
idempotent.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import ssl
from typing import Any, TypeVar

import msgspec

from shoal.cluster.hosts.takeover import Head, JobRecord, Seen
from shoal.config.hosts import JournalConfig
from shoal.errors import ConfigError, JournalUnreachable

CA, CERTIFICATE, KEY = "ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"
"""Environment variables naming the files for etcds://, as etcdctl does."""

USER = "ETCDCTL_USER"
"""NAME:PASSWORD, where the URL has none."""

MAX_ANSWER_BYTES = 1 << 20

T = TypeVar("T")

_UNAUTHENTICATED, _NOT_FOUND, _NO_AUTHENTICATION = 16, 5, 9
_USER_REFUSED = (3, 7, _UNAUTHENTICATED)
"""No user or a wrong password, no permission, no token."""


_NO_TLS = ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING")
"""Reasons of OpenSSL where the other side does not speak TLS."""


class _Refused(Exception):
    """etcd answered with an error of this gRPC code."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message)


class Etcd:
    """A client of one etcd cluster."""

    def __init__(self, config: JournalConfig, *, timeout_s: float) -> None:
        """`timeout_s` is the limit for each member's answer."""
        self.shown, self._timeout_s = config.shown, timeout_s
        self._members = list(config.members)
        self._user = (config.user, config.password) if config.user else _user_of_environment()
        self._token = ""
        self._tls = _tls_context() if config.tls else None

    def call(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Answer of the first member that responds; otherwise JournalUnreachable, with each member's reason."""
        tried: dict[str, str] = {}
        is_refused = False
        for _ in range(len(self._members)):
            host, port = member = self._members[0]
            try:
                return self._call(member, path, request)
            except (OSError, http.client.HTTPException, ValueError, _Refused) as error:
                if isinstance(error, _Refused) and error.code == _NOT_FOUND:
                    return {}
                is_refused |= isinstance(error, _Refused) and error.code in _USER_REFUSED
                no_tls = isinstance(error, ssl.SSLError) and error.reason in _NO_TLS
                said = (
                    "it hung up when greeted by TLS: it speaks no TLS, or was lost" if no_tls else str(error)
                )
                tried[f"{host}:{port}"] = said or type(error).__name__
                self._members.append(self._members.pop(0))
        raise JournalUnreachable(tried=tried, is_refused=is_refused)

    def _call(self, member: tuple[str, int], path: str, request: dict[str, Any]) -> dict[str, Any]:
        if self._user is not None and not self._token:
            self._authenticate(member)
        try:
            return self._post(member, path, request)
        except _Refused as error:
            if error.code != _UNAUTHENTICATED or self._user is None:
                raise
            # Tokens expire after some minutes, and with the member that issued them.
            self._authenticate(member)
            return self._post(member, path, request)

    def _authenticate(self, member: tuple[str, int]) -> None:
        assert self._user is not None
        self._token = ""
        name, password = self._user
        try:
            answer = self._post(member, "/v3/auth/authenticate", {"name": name, "password": password})
            self._token = str(answer["token"])
        except _Refused as error:
            if error.code != _NO_AUTHENTICATION:  # else this etcd has authentication off
                raise

    def _post(self, member: tuple[str, int], path: str, request: dict[str, Any]) -> dict[str, Any]:
        host, port = member
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(request), headers)
            response = connection.getresponse()
            said = response.read(MAX_ANSWER_BYTES)
        try:
            # A keepalive is a stream of answers, of which we read the first.
            answer = json.loads(said.split(b"\n")[0])
            if response.status == 200:
                return dict(answer.get("result", answer))
            raise _Refused(int(answer["code"]), str(answer.get("message") or answer.get("error")))
        except (ValueError, KeyError, TypeError, AttributeError):
            shown = said[:80].decode(errors="replace").strip()
            raise ValueError(f"HTTP {response.status}, no etcd 3.4 or later: {shown!r}") from None


class JobJournal:
    """Both records of one job."""

    def __init__(self, etcd: Etcd, job_id: str) -> None:
        self.prefix = f"/shoal/{job_id}/"
        self._etcd, self.shown = etcd, etcd.shown
        self._head, self._record = self.prefix + "head", self.prefix + "job"

    def read(self) -> Seen:
        answer = self._etcd.call(
            "/v3/kv/range", {"key": _coded(self.prefix), "range_end": _after(self.prefix)}
        )
        found = {base64.b64decode(each["key"]).decode(): each for each in answer.get("kvs", ())}
        head, record = found.get(self._head), found.get(self._record)
        try:
            return Seen(
                _decoded(head, Head) if head else None,
                _decoded(record, JobRecord) if record else None,
                int(record["mod_revision"]) if record else 0,
            )
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(
                f"{self.prefix} in etcd is not what this version of shoal writes there: {error}. Nothing was started; "
                f"`etcdctl del --prefix {self.prefix}` removes it."
            ) from None

    def grant(self, ttl_s: int) -> int:
        return int(self._etcd.call("/v3/lease/grant", {"TTL": ttl_s})["ID"])

    def renew(self, lease: int) -> bool:
        """Renew the lease; False if it has expired."""
        return int(self._etcd.call("/v3/lease/keepalive", {"ID": lease}).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        self._etcd.call("/v3/lease/revoke", {"ID": lease})

    def claim(self, lease: int, head: Head, record: JobRecord, *, revision: int) -> int | None:
        """Become the head if there is none and the record is still at `revision`; returns the fencing token."""
        answer = self._transact(
            compare=[_compare(self._head, "CREATE", 0), _compare(self._record, "MOD", revision)],
            success=[_put(self._head, head, lease), _put(self._record, record)],
            failure=[{"request_range": {"key": _coded(self._head)}}],
        )
        if answer.get("succeeded"):
            return int(answer["header"]["revision"])
        for found in answer["responses"][0]["response_range"].get("kvs", ()):
            if int(found.get("lease", 0)) == lease:  # the same request had succeeded, and its answer was lost
                return int(found["create_revision"])
        return None

    def write(self, token: int, lease: int, head: Head, record: JobRecord) -> bool:
        """Write the record; False if the head with this token is no longer the head."""
        answer = self._transact(
            compare=[_compare(self._head, "CREATE", token)],
            success=[_put(self._head, head, lease), _put(self._record, record)],
        )
        return bool(answer.get("succeeded"))

    def end(self, token: int, record: JobRecord | None) -> None:
        """Remove the head's record, and put the job's last one, or remove that too."""
        done = {"request_delete_range": {"key": _coded(self._record)}}
        self._transact(
            compare=[_compare(self._head, "CREATE", token)],
            success=[
                {"request_delete_range": {"key": _coded(self._head)}},
                _put(self._record, record) if record is not None else done,
            ],
        )

    def _transact(self, **request: Any) -> dict[str, Any]:
        return self._etcd.call("/v3/kv/txn", request)


def _compare(key: str, target: str, revision: int) -> dict[str, Any]:
    field = {"CREATE": "create_revision", "MOD": "mod_revision"}[target]
    return {"key": _coded(key), "target": target, "result": "EQUAL", field: revision}


def _put(key: str, value: Head | JobRecord, lease: int = 0) -> dict[str, Any]:
    put = {"key": _coded(key), "value": base64.b64encode(msgspec.json.encode(value)).decode(), "lease": lease}
    return {"request_put": put}


def _coded(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


def _after(prefix: str) -> str:
    """End of the range of all keys that begin so."""
    return _coded(prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _decoded(found: dict[str, Any], kind: type[T]) -> T:
    return msgspec.json.decode(base64.b64decode(found["value"]), type=kind)


def _user_of_environment() -> tuple[str, str] | None:
    name, _, password = os.environ.get(USER, "").partition(":")
    return (name, password) if name else None


def _tls_context() -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=os.environ.get(CA) or None)
        if os.environ.get(CERTIFICATE):
            context.load_cert_chain(os.environ[CERTIFICATE], os.environ.get(KEY) or None)
        return context
    except OSError as error:
        named = ", ".join(
            f"{name}={os.environ[name]}" for name in (CA, CERTIFICATE, KEY) if os.environ.get(name)
        )
        raise ConfigError(
            f"the certificates for etcds:// cannot be read ({named}): {error}. Nothing was started; they are PEM files on this "
            "host."
        ) from None
