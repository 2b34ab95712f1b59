"""The whole product on a real cluster: installed by Helm, loaded, disturbed and observed.

`make demo` and the end-to-end tests share these modules.
"""
