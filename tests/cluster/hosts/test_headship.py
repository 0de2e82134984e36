"""Headship in a real etcd: one head, fenced writes, members that are lost, passwords and certificates."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import etcd_members
from etcd_members import EtcdMembers, free_ports, local_members
from shoal.cluster.hosts import headship
from shoal.cluster.hosts.etcd import Etcd, JobJournal
from shoal.cluster.hosts.headship import Headship
from shoal.cluster.hosts.takeover import GiveUp, JobRecord
from shoal.config.hosts import JournalConfig, parse_journal
from shoal.config.liveness import LivenessConfig
from shoal.errors import ConfigError, HeadFenced, JournalUnreachable
from waiting import wait_until

LEASE_S = 4.0


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMembers]:
    if reason := etcd_members.unsupported():
        pytest.skip(reason)
    members = local_members(tmp_path_factory.mktemp("etcd"))
    yield members
    members.close()


class Run:
    """A job in etcd."""

    def __init__(self, url: str) -> None:
        self.url, self.launches = url, [time.time()]
        self.etcd = Etcd(parse_journal(url), timeout_s=1.0)
        self.journal = JobJournal(self.etcd, headship.job_id(self.launches))
        self.heads: list[Headship] = []

    def start(self, lease_s: float = LEASE_S) -> Headship:
        return self._kept(headship.become_head(self.etcd, job="job", launches=self.launches, lease_s=lease_s))

    def seek(self, step: int = 0) -> Headship | GiveUp | None:
        found = headship.seek(
            parse_journal(self.url),
            job="job",
            run_id=headship.job_id(self.launches),
            launches=self.launches,
            step=step,
            liveness=LivenessConfig(head_lease_s=LEASE_S, host_dead_after_s=1.0),
            try_join=lambda head: True,
            say=lambda text: None,
        )
        return self._kept(found) if isinstance(found, Headship) else found

    def _kept(self, head: Headship) -> Headship:
        self.heads.append(head)
        return head

    def record(self) -> JobRecord | None:
        with contextlib.suppress(JournalUnreachable):  # while its members choose another leader
            return self.journal.read().record
        return None


@pytest.fixture
def run(members: EtcdMembers) -> Iterator[Run]:
    made = Run(members.url)
    yield made
    for head in made.heads:
        head.close(0)


def test_a_job_has_one_head_and_a_second_one_is_told_where_it_is(run: Run) -> None:
    run.start().listens("shoal://10.0.0.1:7070")
    assert wait_until(lambda: bool((head := run.journal.read().head) and head.address))
    with pytest.raises(
        ConfigError, match=r"job is running: \S+ \(shoal://10.0.0.1:7070\) is its head, by etcd://127"
    ):
        run.start()


def test_two_jobs_of_one_name_have_heads_of_their_own(run: Run) -> None:
    run.start()
    run.launches = [run.launches[0] + 1.0]
    run.journal = JobJournal(run.etcd, headship.job_id(run.launches))
    assert run.start().generation == 1


def test_a_head_whose_lease_is_over_is_followed_and_its_writes_are_refused(run: Run) -> None:
    old = run.start()
    old.saved(7)
    assert wait_until(lambda: run.record() == JobRecord(1, run.launches, 7))
    run.journal.revoke(old._lease)
    new = run.seek(step=7)
    assert isinstance(new, Headship)
    assert new.generation == 2
    assert not run.journal.write(old._token, old._lease, old._head, JobRecord(1, run.launches, 99))
    old.saved(99)
    with pytest.raises(HeadFenced, match="no longer the head of job: its lease in etcd has ended"):
        wait_until(lambda: old.check() is not None)
    old.close(0)
    assert run.record() == JobRecord(2, run.launches, 7)


def test_a_job_that_was_ended_is_resumed_by_hand_and_never_taken_over(run: Run) -> None:
    run.start().close(130)
    assert run.seek() == GiveUp("the job has ended")
    assert run.start().generation == 2
    run.heads[-1].close(0)
    assert run.record() is None, "a job that is done leaves nothing behind"


def test_a_head_that_could_not_begin_leaves_the_job_to_others(run: Run) -> None:
    run.start().close(None)
    assert isinstance(run.seek(), Headship)


def test_a_run_directory_that_has_not_seen_the_newest_launch_is_refused(run: Run) -> None:
    head = run.start()
    head.launched([*run.launches, run.launches[0] + 60.0])
    assert wait_until(lambda: (record := run.record()) is not None and len(record.launches) == 2)
    head.close(3)
    with pytest.raises(ConfigError, match="job went on elsewhere: its launch 2 began at"):
        run.start()


def test_a_head_whose_supervisor_hangs_ends_before_another_may_follow(run: Run) -> None:
    script = (
        "import sys, time\n"
        "from shoal.cluster.hosts import headship\n"
        "from shoal.cluster.hosts.etcd import Etcd\n"
        "from shoal.config.hosts import parse_journal\n"
        "etcd = Etcd(parse_journal(sys.argv[1]), timeout_s=1.0)\n"
        "headship.become_head(etcd, job='job', launches=[float(sys.argv[2])], lease_s=4.0).check()\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, run.url, repr(run.launches[0])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == HeadFenced.exit_code
    assert "(the supervisor has hung for" in ended.stderr
    assert run.journal.read().head is not None, "its lease outlasts it"


def test_an_etcd_without_tls_is_told_from_one_that_is_lost(members: EtcdMembers) -> None:
    with pytest.raises(ConfigError, match="it speaks no TLS"):
        _opened(members.url.replace("etcd://", "etcds://"))


def test_loss_of_the_leading_member_is_not_noticed_and_of_two_fences_the_head(tmp_path: Path) -> None:
    if reason := etcd_members.unsupported():
        pytest.skip(reason)
    members = local_members(tmp_path)
    try:
        run = Run(members.url)
        head = run.start(lease_s=8.0)
        leader = members.leader()
        members.kill(leader)
        head.saved(3)
        assert wait_until(lambda: (record := run.record()) is not None and record.step == 3, 20.0)
        head.check()
        assert head.news() == ""
        members.kill((leader + 1) % 3)
        told: list[str] = []
        with pytest.raises(HeadFenced, match=r"not renewed for 6\.\d s \(127"):
            wait_until(lambda: told.append(head.news()) or head.check() is not None, 20.0)
        assert any("the job goes on, and ends here in" in each for each in told)
        head.close(0)
    finally:
        members.close()


def test_an_etcd_with_password_and_certificate_is_used_and_the_password_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := etcd_members.unsupported():
        pytest.skip(reason)
    certificate, key = _certificate(tmp_path)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    port, peer = free_ports(2)
    etcd = EtcdMembers(
        [("127.0.0.1", port, peer)],
        lambda _, command: subprocess.Popen(command, **quiet),  # type: ignore[call-overload]
        lambda _: tmp_path / "data",
        [f"--cert-file={certificate}", f"--key-file={key}"],
        scheme="https",
    )
    try:
        assert wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in _refusal(etcd.url)), _refusal(etcd.url)
        monkeypatch.setenv("ETCDCTL_CACERT", str(certificate))
        etcd.wait_until_ready()
        client = Etcd(parse_journal(etcd.url), timeout_s=5.0)
        client.call("/v3/auth/user/add", {"name": "root", "password": "s3cr@t"})
        client.call("/v3/auth/role/add", {"name": "root"})
        client.call("/v3/auth/user/grant", {"user": "root", "role": "root"})
        client.call("/v3/auth/enable", {})
        for login in ("", "root:wr0ng@"):
            with pytest.raises(ConfigError, match=r"refuses this user: .* ETCDCTL_USER=NAME") as refused:
                _opened(etcd.url.replace("://", f"://{login}"))
            assert "wr0ng" not in str(refused.value)
        assert _opened(etcd.url.replace("://", "://root:s3cr%40t@")) is None
        monkeypatch.setenv("ETCDCTL_USER", "root:s3cr@t")
        assert _opened(etcd.url) is None
    finally:
        etcd.close()


def test_an_etcd_that_nobody_runs_is_named_with_every_member_and_reason() -> None:
    one, two = free_ports(2)
    with pytest.raises(ConfigError) as refused:
        _opened(f"etcd://user:secret@127.0.0.1:{one},127.0.0.1:{two}")
    assert f"tried were 127.0.0.1:{one} ([Errno 111] Connection refused), 127.0.0.1:{two} (" in str(
        refused.value
    )
    assert "secret" not in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h1:2379", "--journal http://h1:2379 is no address of an etcd; one reads etcd://"),
        ("etcd://", "'' is no member"),
        ("etcd://me:secret@h1:99999", "--journal etcd://...@h1:99999: 'h1:99999' is no member"),
        ("etcd://h1:2379/path", "'h1:2379/path' is no member"),
        ("h1:2379", "--journal h1:2379 is no address"),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url: str, shown: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_journal(url)
    assert shown in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_url_has_members_a_login_and_a_form_without_it() -> None:
    config = parse_journal("etcds://me:a%2Fb@h1,h2:2380,[::1]:99")
    assert config == JournalConfig(
        members=(("h1", 2379), ("h2", 2380), ("::1", 99)), tls=True, user="me", password="a/b"
    )
    assert config.shown == "etcds://h1:2379,h2:2380,[::1]:99"
    assert "a/b" not in repr(config)


def _refusal(url: str) -> str:
    """What is said of an etcd that is not used; one that is just starting may not answer yet."""
    with pytest.raises(ConfigError) as refused:
        _opened(url)
    return str(refused.value)


def _opened(url: str) -> None:
    headship.open_journal(parse_journal(url), LivenessConfig())


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Of an authority that is its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"
