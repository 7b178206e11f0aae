"""Certificates and node keys of a rehearsal."""

import datetime
import ssl
import stat

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key

from fedveil.core.message import Refused
from fedveil.deploy import keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("certificates")
    keys.certificates(path)
    keys.node_key(path / "node-0")
    return path


def read(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_server_certificate_is_the_authoritys(folder):
    authority, server = read(folder / "ca.crt"), read(folder / "server.crt")
    server.verify_directly_issued_by(authority)
    authority.verify_directly_issued_by(authority)
    with pytest.raises((InvalidSignature, ValueError)):
        authority.verify_directly_issued_by(server)


def test_the_server_certificate_is_for_this_machine_only(folder):
    names = read(folder / "server.crt").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    basics = [read(folder / name).extensions.get_extension_for_class(x509.BasicConstraints) for name in NAMES]
    assert [part.value.ca for part in basics] == [True, False]
    assert all(part.critical for part in basics)


NAMES = ("ca.crt", "server.crt")


def test_certificates_are_valid_now_and_for_years(folder):
    now = datetime.datetime.now(datetime.UTC)
    for certificate in (read(folder / name) for name in NAMES):
        assert certificate.not_valid_before_utc < now
        assert certificate.not_valid_after_utc > now + datetime.timedelta(days=365)


def test_private_files_are_their_owners_and_the_authoritys_key_is_not_kept(folder):
    assert {path.name for path in folder.iterdir()} == {"ca.crt", "server.crt", "server.key", "node-0", "node-0.pub"}
    for name in ("server.key", "node-0"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert (
        load_pem_private_key((folder / "server.key").read_bytes(), None).public_key()
        == read(folder / "server.crt").public_key()
    )


def test_a_node_key_is_read_by_openssh_and_by_flower(folder):
    key = load_ssh_private_key((folder / "node-0").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert load_ssh_public_key((folder / "node-0.pub").read_bytes()) == key.public_key()
    assert (folder / "node-0.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    register = pytest.importorskip("flwr.cli.supernode.register")
    assert register.try_load_public_key(folder / "node-0.pub").startswith(b"-----BEGIN PUBLIC KEY-----")


def test_clients_know_each_other_by_their_identities(tmp_path):
    for k in range(2):
        keys.identity(tmp_path / f"identity-{k}")
    first, second = (keys.identities(tmp_path, (k, tmp_path / f"identity-{k}")) for k in range(2))
    second.verify(0, first.sign(0, b"words"), b"words")
    with pytest.raises(Refused, match="client 1 did not sign this"):
        second.verify(1, first.sign(0, b"words"), b"words")
    with pytest.raises(Refused, match="private key of client 1 is not here"):
        first.sign(1, b"words")
    assert keys.identities(tmp_path).own == {}


def test_a_key_of_another_kind_is_no_identity(folder, tmp_path):
    keys.node_key(tmp_path / "identity-0")
    with pytest.raises(ValueError, match="no Ed25519 key of a client with a number"):
        keys.identities(tmp_path)
    with pytest.raises(ValueError, match="no Ed25519 key; make one with"):
        keys.identities(folder, (0, tmp_path / "identity-0"))


def test_a_private_file_is_never_written_over(folder):
    before = (folder / "node-0").read_bytes()
    with pytest.raises(FileExistsError):
        keys.node_key(folder / "node-0")
    assert (folder / "node-0").read_bytes() == before


def handshake(folder, authority, host):
    """A TLS connection over memory: what the client says of the server's certificate."""
    near, far = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(folder / "server.crt", folder / "server.key")
    trusting = ssl.create_default_context(cafile=authority)
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    server = accepting.wrap_bio(near, far, server_side=True)
    client = trusting.wrap_bio(far, near, server_hostname=host)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.version()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_client_that_knows_the_authority_accepts_the_server(folder, host):
    assert handshake(folder, folder / "ca.crt", host) == "TLSv1.3"


def test_another_name_and_another_authority_are_refused(folder, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(folder, folder / "ca.crt", "example.org")
    keys.certificates(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, tmp_path / "ca.crt", "localhost")
