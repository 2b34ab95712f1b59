"""What a client's connection and its bytes may cost before a request is accepted."""
