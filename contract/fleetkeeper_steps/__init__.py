"""The steps of an engine: their time, and the sequences and KV blocks in them. Pure, and a leaf."""
