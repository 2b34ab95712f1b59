"""Forms of single values, as the API server has them."""
