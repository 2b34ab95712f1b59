"""The one reader of a request's JSON body: for the gateway, the engine's middleware and batch files.

What a body means and whether it is valid never depends on its size or on who reads it. A small body is
parsed. Of a large one an outline is parsed, whose parts are read one at a time.
"""
