"""Keys for a federation: a certificate authority, the server's certificate, and a key for every node."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedagg import files
from fedagg.errors import SettingError

DAYS = 825


def make(folder: Path, nodes: int, hosts: Sequence[str]) -> list[Path]:
    """Write ca.crt, server.crt, server.key, and node-N with node-N.pub for every node; private ones readable by the owner only.

    The authority's own key is used once and never stored, so nobody can sign another certificate with it. Additional nodes need no
    certificate, only a key.
    """
    if (folder / "server.key").exists():
        raise SettingError("keys", str(folder), "already has keys; remove them to make new ones")
    names = [general_name(host) for host in dict.fromkeys(hosts)]
    files.folder(folder, "keys")
    folder.chmod(0o700)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = name("fedagg federation authority")
    own = certificate(issuer, issuer, authority, authority, [], ca=True)
    signed = certificate(issuer, name(hosts[0]), authority, server, names, ca=False)
    written = [
        write_public(folder / "ca.crt", own.public_bytes(Encoding.PEM)),
        write_public(folder / "server.crt", signed.public_bytes(Encoding.PEM)),
        write_private(folder / "server.key", server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())),
    ]
    for node in range(nodes):
        written += node_key(folder, node)
    return written


def node_key(folder: Path, node: int) -> list[Path]:
    key = ec.generate_private_key(ec.SECP384R1())
    return [
        write_private(folder / f"node-{node}", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())),
        write_public(folder / f"node-{node}.pub", key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"),
    ]


def name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def certificate(
    issuer: x509.Name,
    subject: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    holder: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    holder_key, signer_key = holder.public_key(), signer.public_key()
    usage = x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)
    builder = (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(holder_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(holder_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key), critical=False)
    )
    if not ca:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not re.fullmatch(r"[\w*-]+(\.[\w-]+)*", host, re.ASCII):
            fix = "give a name in ASCII or an IP address, without a port"
            raise SettingError("host", host, fix) from None
        return x509.DNSName(host)


def write_private(path: Path, content: bytes) -> Path:
    """Write a file that others can never read, not even for a moment."""
    before = os.umask(0o077)
    try:
        return write_public(path, content)
    finally:
        os.umask(before)


def write_public(path: Path, content: bytes) -> Path:
    files.write(path, content)
    return path
