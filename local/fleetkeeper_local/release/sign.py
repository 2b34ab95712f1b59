"""Signatures by cosign, of images and charts by digest and of files.

https://docs.sigstore.dev/cosign/signing/signing_with_containers/
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fleetkeeper.adapters.registry.logins import BadLogin, find_login
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.shell import attempt
from fleetkeeper_local.control_plane.programs import program_path
from fleetkeeper_local.release import references

TIMEOUT_S = 300.0
PUBLIC_KEY = "cosign.pub"
BUNDLE_SUFFIX = ".sigstore.json"
PUBLIC_MODE = 0o644
"""cosign lets only the user read what it writes."""


@dataclass(frozen=True)
class Signer:
    """A signer with a private key, or with the identity of a CI job (keyless).

    With a key, nothing is sent to the public transparency log, so no network beyond the registry is
    needed. A keyless signature is in that log, which is how others find out who signed.
    """

    key: str = ""
    """A file of `cosign generate-key-pair`, or a URI of a key service; empty for keyless."""

    def check(self, target: Path) -> None:
        """Write the public key into `target`, if there is a key.

        Raises:
            LocalError: the key cannot be used; nothing was signed.
        """
        if self.key:
            public = target / PUBLIC_KEY
            _cosign("public-key", f"--key={self.key}", f"--outfile={public}")
            public.chmod(PUBLIC_MODE)

    def sign(self, name: str) -> None:
        """Sign what a registry has under `HOST/NAME@sha256:...`; the signature refers to it.

        Raises:
            LocalError: cosign failed; the text is cosign's.
        """
        with tempfile.TemporaryDirectory() as scratch:
            _write_login(name, Path(scratch) / "config.json")
            _cosign("sign", *self._options(), name, docker_config=scratch)

    def sign_file(self, path: Path) -> None:
        """Write the signature of a file to `NAME.sigstore.json` beside it."""
        bundle = path.with_name(path.name + BUNDLE_SUFFIX)
        _cosign("sign-blob", *self._options(), f"--bundle={bundle}", str(path))
        bundle.chmod(PUBLIC_MODE)

    def _options(self) -> list[str]:
        if not self.key:
            return ["--yes"]
        # The signing configuration of sigstore names the log, and is downloaded.
        return ["--yes", f"--key={self.key}", "--use-signing-config=false", "--tlog-upload=false"]


def _write_login(name: str, path: Path) -> None:
    """Give cosign the login of skopeo, whose file it finds for some users only."""
    host, _, rest = references.without_tag(name).partition("/")
    try:
        login = find_login(host, rest)
    except BadLogin as error:
        raise LocalError(str(error)) from error
    auths = {host: {"auth": login.basic.removeprefix("Basic ")}} if login else {}
    path.touch(mode=0o600)
    path.write_text(json.dumps({"auths": auths}))


def _cosign(command: str, *arguments: str, docker_config: str = "") -> None:
    environment = [f"DOCKER_CONFIG={docker_config}"] if docker_config else []
    argv = ["env", *environment, str(program_path("cosign")), command, *arguments]
    done = attempt(*argv, timeout_s=TIMEOUT_S)
    if done.returncode:
        raise LocalError(
            f"`cosign {command} {' '.join(arguments)}` failed: {done.stderr.strip()}; "
            "a key's password comes from COSIGN_PASSWORD"
        )
