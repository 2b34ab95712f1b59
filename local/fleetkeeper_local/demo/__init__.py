"""The whole product on a real cluster: installed by Helm, loaded, disturbed, and looked at.

`make demo` and the end-to-end tests are made of the same parts.
"""
