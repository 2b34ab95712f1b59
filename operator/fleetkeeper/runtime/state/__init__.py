"""Records of the cluster's objects, by service."""
