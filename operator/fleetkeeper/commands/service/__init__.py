"""Commands about InferenceServices in files, which need no cluster, and what they share."""
