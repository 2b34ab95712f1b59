"""One builder a child object; each returns a complete plain dict."""
