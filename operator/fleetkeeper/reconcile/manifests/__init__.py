"""One builder for each child object. Each returns a complete plain dict."""
