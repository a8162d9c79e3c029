"""Files of certificates: what is wrong with them is told at start; openssl takes what `kvrail certs` makes."""

import os
import re
import shutil
import ssl
import subprocess
from datetime import datetime, timedelta

import httpx
import pytest

from kvrail.cli.main import main
from kvrail.errors import ConfigError
from kvrail.rpc.http_side import side_server
from kvrail.security.tls import ROLES, Tls, parts_of
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    made = Authority(tmp_path_factory.mktemp("ca"))
    for role in ("router", "decode"):
        made.write(role)
    made.write("router", "old", days=-1)
    made.write("router", "early", days=1)
    made.write("router", "elsewhere", hosts="elsewhere.example")
    made.write("router", "anywhere", hosts="*.example")
    (made.folder / "empty.pem").write_text("")
    (made.folder / "foreign.pem").write_bytes(Authority(made.folder / "other").made.pem)
    return made


@pytest.mark.parametrize(
    ("ca", "cert", "key", "match"),
    [
        ("none.pem", "router.pem", "router.key", "--tls-ca .*none.pem: No such file"),
        ("ca.pem", "none.pem", "router.key", "--tls-cert .*none.pem: No such file"),
        ("ca.pem", "router.pem", "none.key", "--tls-key .*none.key: No such file"),
        ("ca.pem", "empty.pem", "router.key", "--tls-cert .*no certificate in PEM"),
        ("empty.pem", "router.pem", "router.key", "--tls-ca .*no certificate in PEM"),
        ("ca.pem", "router.pem", "empty.pem", "--tls-key .*no PEM key"),
        ("ca.pem", "router.pem", "decode.key", "--tls-key .*decode.key does not belong to --tls-cert .*router.pem"),
        ("ca.pem", "old.pem", "old.key", "--tls-cert .*expired 20.*renew"),
        ("ca.pem", "early.pem", "early.key", "--tls-cert .*not valid before 20"),
        ("foreign.pem", "router.pem", "router.key", "router.pem is not signed by --tls-ca .*foreign.pem"),
        ("ca.pem", "decode.pem", "decode.key", "not one of a router.*kvrail://decode"),
        ("ca.pem", "elsewhere.pem", "elsewhere.key", "does not name localhost.*elsewhere.example"),
        ("ca.pem", "anywhere.pem", "anywhere.key", "does not name localhost"),
    ],
)
def test_what_is_wrong_is_told_at_start(authority, ca, cert, key, match):
    with pytest.raises(ConfigError, match=match):
        Tls(*(str(authority.folder / name) for name in (ca, cert, key)), "router", "localhost")


@pytest.mark.parametrize(
    ("name", "host", "verify"),
    [
        ("router", "127.0.0.1", "host"),
        ("router", "0.0.0.0", "host"),
        ("elsewhere", "localhost", "role"),
        ("anywhere", "r1.example", "host"),
    ],
)
def test_what_is_good_is_taken(authority, name, host, verify):
    assert Tls(*authority.settings(name).values(), "router", host, verify).material().number == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_key_that_cannot_be_read(authority, tmp_path):
    paths = authority.settings("router")
    key = shutil.copy(paths["tls_key"], tmp_path)
    os.chmod(key, 0)
    with pytest.raises(ConfigError, match=r"--tls-key .*Permission denied; let this process's user read it"):
        Tls(paths["tls_ca"], paths["tls_cert"], key, "router", "")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_ca_may_have_comments_in_any_language(tmp_path, monkeypatch, encoding):
    monkeypatch.setattr("kvrail.runtime.watched.LOOK_EVERY_S", 0.0)
    authority = Authority(tmp_path)
    tls = authority.tls("router")
    comment = "# M\u00fcllers CA\n".encode(encoding)
    (tmp_path / "ca.pem").write_bytes(comment + authority.made.pem)
    assert tls.material().number == 2
    assert Tls(*authority.settings("router").values(), "router", "").material().ca.startswith(comment)


def test_a_certificate_that_is_not_valid_yet_is_taken_when_it_is(tmp_path, monkeypatch, caplog):
    """Its signer's clock is ahead. What ends soon is told once it is taken, not at each look."""
    monkeypatch.setattr("kvrail.runtime.watched.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("kvrail.runtime.watched.RETRY_PAUSE", 0)
    authority = Authority(tmp_path)
    tls = authority.tls("router")
    authority.write("router", days=1)  # from tomorrow on, for a day
    for _ in range(3):
        assert tls.material().number == 1
    assert len(re.findall("reload failed.*not valid before", caplog.text)) == 1

    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) + timedelta(days=1.5)

    monkeypatch.setattr("kvrail.security.tls.datetime", Later)
    for _ in range(3):
        assert tls.material().number == 2
    assert caplog.text.count("expires in 0.5 days") == 1


def openssl(*arguments):
    return subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def made(capsys, *arguments):
    status = main(["certs", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_the_command_makes_what_openssl_verifies(tmp_path, capsys):
    out = tmp_path / "certs"
    status, told, _ = made(capsys, out, "--hosts", "d1.example,10.0.0.1", "--days", 7)
    assert status == 0 and len(told.splitlines()) == 1 + len(ROLES) and told.count("expires 20") == 1 + len(ROLES)
    for role in ROLES:
        assert "OK" in openssl("verify", "-x509_strict", "-CAfile", out / "ca.pem", out / f"{role}.pem")
        text = openssl("x509", "-in", out / f"{role}.pem", "-noout", "-ext", "subjectAltName,extendedKeyUsage")
        assert all(f"URI:kvrail://{part}" in text for part in parts_of(role))
        assert "DNS:d1.example" in text and "IP Address:10.0.0.1" in text
        assert "Web Server" in text and "Web Client" in text
        assert openssl("pkey", "-in", out / f"{role}.key", "-pubout") == openssl(
            "x509", "-in", out / f"{role}.pem", "-noout", "-pubkey"
        )
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert {mode for name, mode in modes.items() if name.endswith(".key")} == {0o600}
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    status, _, error = made(capsys, out)
    assert status == 2 and "has ca.key, ca.pem, decode.key" in error and "--renew" in error
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "decode.key").chmod(0o640)  # a service of another user reads it by its group
    assert made(capsys, out, "--renew", "--roles", "decode")[0] == 0
    assert (out / "decode.key").stat().st_mode & 0o777 == 0o640
    changed = {path.name for path in out.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"decode.pem", "decode.key"}
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    assert made(capsys, out, "--keep", "--days", "20")[0] == 0  # the shortest one lives for 7 days of 20
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept
    assert made(capsys, out, "--keep")[0] == 0  # of 90
    now = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {name for name in now if now[name] == kept[name]} == {"ca.pem", "ca.key", "decode.pem", "decode.key"}
    assert made(capsys, out, "--force")[0] == 0
    assert not any(path.read_bytes() == before[path.name] for path in out.iterdir())


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def kept(tmp_path, capsys):
    """A folder that --keep has made, and what changed by another --keep."""
    out = tmp_path / "certs"
    assert made(capsys, out, "--keep")[0] == 0

    def keep():
        before = content(out)
        status, _, error = made(capsys, out, "--keep")
        return status, {name for name, is_now in content(out).items() if before.get(name) != is_now}, error

    assert keep() == (0, set(), "")
    return out, keep


def test_keep_makes_what_is_missing_or_does_not_fit(kept, capsys):
    """As after a kill in the middle of a start or of a renewal."""
    out, keep = kept
    (out / "metrics.pem").unlink()
    (out / "worker.key").unlink()
    assert keep() == (0, {"metrics.pem", "metrics.key", "worker.pem", "worker.key"}, "")
    old = (out / "router.pem").read_bytes()
    assert made(capsys, out, "--renew", "--roles", "router")[0] == 0
    (out / "router.pem").write_bytes(old)  # between its key and its certificate
    assert keep() == (0, {"router.pem", "router.key"}, "")
    (out / "decode.pem").write_text("")
    assert keep() == (0, {"decode.pem", "decode.key"}, "")
    for role in ROLES:
        Tls(*(str(out / name) for name in ("ca.pem", f"{role}.pem", f"{role}.key")), role, "127.0.0.1")


def test_keep_makes_a_new_ca_only_where_there_is_none_of_use(kept, tmp_path, capsys):
    out, keep = kept
    other = Authority(tmp_path / "other")
    for name, pem in (("ca.pem", None), ("ca.key", b"broken"), ("ca.pem", other.made.pem)):
        if pem is None:
            (out / name).unlink()
        else:
            (out / name).write_bytes(pem)
            (out / "router.key").unlink(missing_ok=True)
        assert keep() == (0, {f"{each}.{end}" for each in ("ca", *ROLES) for end in ("pem", "key")}, "")
        assert keep() == (0, set(), "")
    (out / "ca.key").unlink()  # kept elsewhere
    assert keep() == (0, set(), "")
    (out / "router.key").unlink()
    status, changed, error = keep()
    assert (status, changed) == (2, set()) and "there is no" in error and "ca.key" in error


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--hosts", "a:7001"), "--hosts: 'a:7001' is no host"),
        (("--roles", "router,king"), "--roles: 'king' is no role"),
        (("--roles", ","), "--roles: none is named"),
        (("--days", "0"), "--days: '0' is no number of days"),
        (("--renew",), "--renew: there is no .*ca.pem"),
    ],
)
def test_what_the_command_refuses(tmp_path, capsys, arguments, match):
    status, _, error = made(capsys, tmp_path / "out", *arguments)
    assert status == 2 and re.search(match, error)
    assert not list((tmp_path / "out").glob("*"))


async def one_metric(path, accept):
    return b"m 1\n", "text/plain"


async def test_the_metrics_port_of_a_worker(authority, monkeypatch):
    """Metrics for members of the CA, health for all; another CA is taken over while the port is open."""
    monkeypatch.setattr("kvrail.runtime.watched.LOOK_EVERY_S", 0.0)
    tls = authority.tls("decode")
    with side_server("127.0.0.1", 0, one_metric, lambda: "", tls) as port:
        await ask_the_metrics_port(port, authority)


async def ask_the_metrics_port(port, authority):
    def client(of, role=None):
        context = ssl.create_default_context(cafile=str(of.folder / "ca.pem"))
        if role is not None:
            of.write(role)
            context.load_cert_chain(of.folder / f"{role}.pem", of.folder / f"{role}.key")
        return httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=context)

    async with client(authority, "metrics") as scraper:
        assert (await scraper.get("/metrics")).text == "m 1\n"
    async with client(authority) as stranger:
        assert (await stranger.get("/metrics")).status_code == 403
        assert (await stranger.get("/health")).text == "ok\n"
    foreign = Authority(authority.folder / "third")
    context = ssl.create_default_context(cafile=str(authority.folder / "ca.pem"))
    foreign.write("metrics")
    context.load_cert_chain(foreign.folder / "metrics.pem", foreign.folder / "metrics.key")
    async with httpx.AsyncClient(verify=context) as spy:
        with pytest.raises(httpx.HTTPError):
            await spy.get(f"https://localhost:{port}/metrics")
    foreign.write("decode")
    for name in ("ca.pem", "decode.key", "decode.pem"):
        shutil.copy(foreign.folder / name, authority.folder / name)
    async with client(foreign, "metrics") as scraper:
        assert (await scraper.get("/metrics")).text == "m 1\n"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as plain:
        with pytest.raises(httpx.HTTPError):
            await plain.get("/health")
