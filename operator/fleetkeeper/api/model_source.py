"""The forms of `model.source`, and what to write for the notations of other systems."""

from __future__ import annotations

from fleetkeeper.api.values.form import Form

_PART = r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)*"
_CLAIM = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_REGISTRY = (
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?((\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)+(:[0-9]{1,5})?|:[0-9]{1,5})"
)
_REPOSITORY = r"(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)+"

_HUB = "for a model on Hugging Face, write hf://ORG/NAME and set revision to its commit of 40 hexadecimal digits"
_CLAIM_PATH = "for files, write pvc://CLAIM/PATH: a PersistentVolumeClaim in the service's namespace, and a directory in it"
_OBJECTS = "for object storage, write s3://BUCKET/PREFIX; the endpoint of a store that speaks S3 is set in the engine profile (objectStorage)"
_IMAGE = "for an image, write oci://REGISTRY/REPOSITORY@sha256:DIGEST"
_IMAGE_DIGEST = "an oci:// source requires a digest instead of a tag, because a tag can move; set it to oci://REGISTRY/REPOSITORY@sha256:DIGEST"

MODEL_SOURCE = Form(
    pattern=(
        rf"^(pvc://{_CLAIM}{_PART}"
        rf"|hf://{_HUB_NAME}/{_HUB_NAME}"
        rf"|s3://{_BUCKET}(/[A-Za-z0-9_][A-Za-z0-9._=-]*)*"
        rf"|oci://{_REGISTRY}{_REPOSITORY}@sha256:[0-9a-f]{{64}}{_PART})$"
    ),
    sentence="must be hf://ORG/NAME, pvc://CLAIM/PATH, s3://BUCKET/PREFIX, or oci://REGISTRY/REPOSITORY@sha256:DIGEST",
    mistakes=(
        (r"\s", "contains white space; remove it, or rename the directory of the model"),
        (
            r"^(hf|pvc|s3|oci)://.*/$",
            "ends with a slash; remove it, as in s3://BUCKET/PREFIX or pvc://CLAIM/PATH",
        ),
        (
            r"^hf://[^/@:]+/[^/@:]+[@:]",
            "has the revision after the name; write hf://ORG/NAME and set revision to the commit of 40 hexadecimal digits",
        ),
        (
            r"^hf://[^/]*$",
            "names no organization; write hf://ORG/NAME, such as hf://Qwen/Qwen3-0.6B, and set revision",
        ),
        (
            r"^hf://",
            "must be hf://ORG/NAME, without a folder or a branch; set revision to the commit of 40 hexadecimal digits",
        ),
        (
            r"^pvc://",
            "must be pvc://CLAIM/PATH: the name of a claim in lowercase, then folders whose names begin with a letter, a digit, or an underscore",
        ),
        (
            r"^s3://",
            "must be s3://BUCKET/PREFIX: a bucket in lowercase, then folders whose names begin with a letter, a digit, or an underscore",
        ),
        (
            r"^oci://[^/]*@",
            "has a login; remove it, and name the Secret of the registry in imagePullSecrets",
        ),
        (
            r"^oci://[^@]*:[^/@]*@",
            "has a tag and a digest; remove the tag, as in oci://REGISTRY/REPOSITORY@sha256:DIGEST",
        ),
        (rf"^oci://{_REGISTRY}{_REPOSITORY}(:[^/@]*)?$", _IMAGE_DIGEST),
        (
            r"^oci://",
            "must be oci://REGISTRY/REPOSITORY@sha256:DIGEST: a host with a dot or a port, a path in lowercase, 64 hexadecimal digits",
        ),
        (r"(?i)^(https?://)?(www\.)?(huggingface\.co|hf\.co)(/|$)", _HUB),
        (r"(?i)^(hf|hub|hugging-?face)(\+[a-z]+)?:", _HUB),
        (r"(?i)^(oci|docker|docker-daemon|docker-archive|image|registry|oras|modelcar):", _IMAGE),
        (r"^[a-z0-9-]+(\.[a-z0-9-]+)*(\.[a-z]{2,}|:[0-9]+)/", _IMAGE),
        (r"^(/|\./|\.\./|~)", _CLAIM_PATH),
        (r"(?i)^(pvc(\+[a-z]+)?|file|local|host-?path|nfs|smb|hdfs|webhdfs|dbfs):", _CLAIM_PATH),
        (r"(?i)^(s3[an]?|gs|gcs|azure|az|abfss?|wasbs?|oss|cos|obs|tos|minio|r2|swift):", _OBJECTS),
        (
            r"(?i)^https?:",
            "models are not read from web addresses; copy the model to a claim (pvc://CLAIM/PATH) or a bucket (s3://BUCKET/PREFIX)",
        ),
        (r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?([@:][A-Za-z0-9._-]+)?$", _HUB),
    ),
)
"""The form of `model.source`. The order of the mistakes goes from the specific to the general."""
