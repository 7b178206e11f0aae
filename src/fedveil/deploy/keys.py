"""Certificates and keys of a rehearsal: TLS for the server's port, an EC key by which the server knows a node, and an
Ed25519 key by which the other clients of a secure sum know it.

The authority signs one certificate, for this machine's own addresses, and its key is never written: nothing else can be
signed with it. Whoever deploys in earnest brings certificates of an authority of his own (docs/how-to/deploy.md).
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedveil.core.identity import Identities

YEARS = 10
HOSTS: tuple[x509.GeneralName, ...] = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


def certificates(folder: Path) -> None:
    """Write ca.crt, server.crt and server.key (PEM) to `folder`."""
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority = _certificate("fedveil rehearsal", authority_key.public_key(), "fedveil rehearsal", authority_key, True)
    server = _certificate("localhost", server_key.public_key(), "fedveil rehearsal", authority_key, False)
    (folder / "ca.crt").write_bytes(authority.public_bytes(Encoding.PEM))
    (folder / "server.crt").write_bytes(server.public_bytes(Encoding.PEM))
    private(folder / "server.key", server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def node_key(path: Path) -> None:
    """Write a P-384 key to `path` and its public half to `path`.pub, both in OpenSSH's format, as Flower reads them."""
    _pair(path, ec.generate_private_key(ec.SECP384R1()))


def identity(path: Path) -> None:
    """The same with an Ed25519 key, by which the other clients know one."""
    _pair(path, Ed25519PrivateKey.generate())


def identities(known: Path, own: tuple[int, Path] | None = None) -> Identities:
    """The public keys in a folder with a file identity-K.pub for each client K, and the private key of one of them."""
    public = {}
    for path in known.glob("identity-*.pub"):
        key = load_ssh_public_key(path.read_bytes())
        number = path.stem.removeprefix("identity-")
        if not isinstance(key, Ed25519PublicKey) or not number.isdecimal():
            raise ValueError(f"{path} is no Ed25519 key of a client with a number; use: ssh-keygen -t ed25519")
        public[int(number)] = key.public_bytes_raw()
    private_ = {}
    if own:
        secret = load_ssh_private_key(own[1].read_bytes(), None)
        if not isinstance(secret, Ed25519PrivateKey):
            raise ValueError(f"{own[1]} is no Ed25519 key; make one with: ssh-keygen -t ed25519")
        private_[own[0]] = secret.private_bytes_raw()
    return Identities(private_, public)


def fingerprint(path: Path) -> str:
    """The fingerprint of a node's public key, as `ssh-keygen -l` prints it."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"{path} is no public EC key; make one with: ssh-keygen -t ecdsa -b 384")
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).rstrip(b"=").decode()


def _pair(path: Path, key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> None:
    private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public + f" {path.name}\n".encode())


def private(path: Path, data: bytes) -> None:
    """Write a new file that only its owner may read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    draft = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(_usage(authority), critical=True)
    )
    if not authority:
        draft = draft.add_extension(x509.SubjectAlternativeName(HOSTS), critical=False)
        draft = draft.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return draft.sign(issuer_key, hashes.SHA384())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(authority: bool) -> x509.KeyUsage:
    """An authority signs certificates, a server signs handshakes."""
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    never = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **never)
