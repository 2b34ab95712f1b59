"""`fleetkeeper-engine keys` and `limits`: signed requests for limits, to try live limits without an operator."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetkeeper_engine.supervisor.control_api.auth import KEYS_FILE

PRIVATE_FILE = "private.pem"
KID = "standalone"


def add_keys_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keys`."""
    parser.add_argument(
        "directory", type=Path, help="directory for public/jwks.json and private.pem"
    )


def add_limits_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `limits`."""
    parser.add_argument("--keys", type=Path, required=True, help="directory that `keys` created")
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="per step")
    parser.add_argument("--lease-seconds", type=int, default=120)
    parser.add_argument(
        "--control", default="http://127.0.0.1:9090", help="URL of the control port"
    )
    parser.add_argument("--pod-uid", default="standalone", help="UID of the target pod")
    parser.add_argument("--issuer", default="fleetkeeper")


def make_keys(args: argparse.Namespace) -> int:
    """Write a new key pair. `serve --control-keys` takes the public half."""
    public = args.directory / "public"
    public.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    private = args.directory / PRIVATE_FILE
    private.touch(mode=0o600)
    private.write_bytes(pem)
    jwk = json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(key.public_key()))
    jwks = {"keys": [{**jwk, "kid": KID, "alg": "EdDSA", "use": "sig"}]}
    (public / KEYS_FILE).write_text(json.dumps(jwks))
    sys.stdout.write(f"{public}\n")
    return 0


def send_limits_request(args: argparse.Namespace) -> int:
    """Sign and send a request for limits, and print the answer. Return 0 if it was accepted."""
    now = time.time()
    claims = {
        "iss": args.issuer,
        "aud": args.pod_uid,
        "iat": now,
        "jti": secrets.token_urlsafe(16),
        "epoch": 1,
    }
    key = (args.keys / PRIVATE_FILE).read_text()
    token = jwt.encode(claims, key, algorithm="EdDSA", headers={"kid": KID})
    body = {
        "sequences": args.sequences,
        "tokens": args.tokens,
        "leaseSeconds": args.lease_seconds,
        # The clock makes the generations of manual requests increase.
        "generation": int(now * 1000),
    }
    request = urllib.request.Request(  # noqa: S310 - the user names the address of their own engine
        f"{args.control}/v1/limits",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        method="PUT",
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310 - as above
            answer = response.read()
    except urllib.error.HTTPError as error:
        sys.stderr.write(f"{error.code} {error.read().decode()}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"no answer from {args.control}: {error}\n")
        return 1
    sys.stdout.write(f"{answer.decode()}\n")
    return 0
