"""The tiny model as an image in the node's registry."""

from __future__ import annotations

from pathlib import Path

from fleetkeeper_local.images import oci, registry
from fleetkeeper_local.node.node import Node


def push_model_image(node: Node, scratch: Path) -> str:
    """Push an image with only the tiny model's files in it; return the source that names it."""
    port = node.settings.registry_port
    layer = oci.write_layer(node.directory / "models" / "tiny", "model", scratch / "layer")
    layout = oci.write_image(scratch / "image", [layer], oci.ImageConfig())
    registry.push(f"oci:{layout}:1", port, "models/tiny", "1")
    return f"oci://localhost:{port}/models/tiny@{oci.image_digest(layout)}/model"
