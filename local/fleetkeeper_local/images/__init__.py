"""Images of the project and of the node, and the registry that has them."""
