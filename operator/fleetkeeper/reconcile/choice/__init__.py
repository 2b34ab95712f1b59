"""The choice of the engine profile and of the router that a service keeps."""
