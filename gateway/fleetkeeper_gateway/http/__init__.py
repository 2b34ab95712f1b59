"""The request path: what clients send, and what they are answered."""
