"""How replicas and batch limits follow queue wait and batch time."""
