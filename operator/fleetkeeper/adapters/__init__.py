"""L2: one module or package per external system."""
