"""The CRD: schema, rules, reference page and error messages."""
